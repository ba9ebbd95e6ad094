"""Muon for the hidden matrices and another optimizer for the rest, as one optimizer."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import AdamW, Optimizer

from fedmuon.core.errors import InputError
from fedmuon.optim.muon import Muon
from fedmuon.optim.portable import PortableOptimizer


class MuonWithAux(PortableOptimizer):
    """Groups with `use_muon: True` go to Muon, those with False to `auxiliary`.

    `groups` come from `param_groups_for_muon(model)` or are written by hand; a group's own options
    win over `muon` and `aux`, the options of the two optimizers. Schedulers, GradScaler and state
    dictionaries see one optimizer with all the groups.

        MuonWithAux(param_groups_for_muon(model), muon={"lr": 0.02}, aux={"lr": 3e-4})
        MuonWithAux(groups, auxiliary=torch.optim.SGD, aux={"lr": 0.1, "momentum": 0.9})
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        muon: Mapping[str, Any] | None = None,
        aux: Mapping[str, Any] | None = None,
        auxiliary: type[Optimizer] = AdamW,
    ) -> None:
        own = [dict(group) for group in groups]
        if not any(_for_muon(group) for group in own):
            raise InputError(
                "No group has use_muon: True, so Muon would never act: pass "
                "param_groups_for_muon(model), or set it in a group of matrices."
            )
        self._parts: dict[bool, Optimizer] = {}
        self._make = {True: (Muon, dict(muon or {})), False: (auxiliary, dict(aux or {}))}
        super().__init__(own, {})

    def _accept(self, group: dict[str, Any]) -> None:
        """Put the group itself, not a copy, under its optimizer, which shares our state."""
        which = _for_muon(group)
        if which in self._parts:
            self._parts[which].add_param_group(group)
            return
        make, options = self._make[which]
        self._parts[which] = make([group], **options)
        self._parts[which].state = self.state

    def _update(self) -> None:
        for part in self._parts.values():
            part.step()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts, "_make": self._make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loading makes new groups and a new state: the parts must see those."""
        super().__setstate__(state)
        for which, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if _for_muon(group) == which]


def _for_muon(group: Mapping[str, Any]) -> bool:
    if not isinstance(group.get("use_muon"), bool):
        raise InputError("A group does not say who takes it: set use_muon to True or False.")
    return group["use_muon"]
