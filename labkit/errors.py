"""The exceptions that carry meaning: everything else is a bug and keeps its traceback."""


class InputError(ValueError):
    """Bad input from a user. The command line prints it as one line and exits with 2."""


class Unsupported(ValueError):
    """A backend or model cannot do this shape on this device. A sweep stores it as status ``unsupported``."""


class WrongResult(RuntimeError):
    """A backend's output differs from the oracle by more than its dtype explains. Status ``wrong``."""


class BackendUnavailable(RuntimeError):
    """A backend cannot run on this machine at all. Nothing falls back to another one."""

    def __init__(self, backend: str, reason: str):
        super().__init__(f"backend {backend!r} is unavailable: {reason}")
        self.reason = reason
