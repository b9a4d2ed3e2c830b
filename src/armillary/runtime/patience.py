"""How long a rank waits for the others: before it says so, and before that is an error."""

import math
from dataclasses import dataclass

__all__ = ["PATIENCE", "Patience"]

REPORT_AFTER = 60.0


@dataclass(frozen=True)
class Patience:
    """
    Args:
        report_after: seconds of one wait after which a rank prints who stands where, and again whenever as long has
            passed; None: it never does. Its default is half of a shorter timeout.
        timeout: seconds after which a wait ends in an error.

    Raises:
        ValueError: one is no positive number, or a wait would end before it is reported.
    """

    report_after: float | None = REPORT_AFTER
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("timeout", "report_after"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf) and not (name == "report_after" and value is None):
                or_none = ", or None for no reports" if name == "report_after" else ""
                raise ValueError(f"{name}: want a positive number of seconds{or_none}, got {value!r}")
        if self.report_after == REPORT_AFTER and self.timeout <= REPORT_AFTER:
            object.__setattr__(self, "report_after", self.timeout / 2)
        if self.report_after is not None and self.report_after >= self.timeout:
            raise ValueError(
                f"report_after={self.report_after:g}: a wait ends after timeout={self.timeout:g} seconds, before it is "
                "reported; give a smaller report_after, or None for no reports"
            )


PATIENCE = Patience()  # of who did not ask for other
