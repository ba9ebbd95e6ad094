"""The one kind of error that a user causes and can mend."""


class InputError(ValueError):
    """Bad input: the message is one sentence that names what is wrong and what to do."""


class NonFinite(InputError):
    """A loss, gradient or model that is NaN or infinite."""
