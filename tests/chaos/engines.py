from .laboratory import Laboratory


def scenario(lab: Laboratory) -> None: ...
