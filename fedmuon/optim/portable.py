"""What our optimizers share: the step around their updates, and state dictionaries without code in
them, tolerant of options that they do not know."""

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from fedmuon.core.threads import without_autocast


class PortableOptimizer(Optimizer):
    """An optimizer whose groups may hold functions: they are not saved, and loading keeps them.

    Whatever a saved group lacks keeps its present value, so that another optimizer's state with
    fewer options loads too.
    """

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; parameters without a gradient stay.

        Inside `torch.autocast` the closure computes as autocast says, and the update in its own
        precision.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            self._update()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group that is refused is not kept."""
        super().add_param_group(param_group)
        try:
            self._accept(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _accept(self, group: dict[str, Any]) -> None:
        raise NotImplementedError  # or refuse it

    def _update(self) -> None:
        raise NotImplementedError  # the parameters move by their gradients

    def state_dict(self) -> dict[str, Any]:
        """As in torch, less the options that are functions."""
        whole = super().state_dict()
        groups = [
            {key: value for key, value in group.items() if not callable(value)}
            for group in whole["param_groups"]
        ]
        return {**whole, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, with the options that the saved groups lack left as they are."""
        saved = state_dict["param_groups"]
        if len(saved) == len(self.param_groups):
            saved = [
                {**{key: value for key, value in own.items() if key != "params"}, **group}
                for own, group in zip(self.param_groups, saved, strict=True)
            ]
        super().load_state_dict({**state_dict, "param_groups": saved})
