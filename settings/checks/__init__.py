"""The checks of a run's settings: `keys` looks at each value alone, the others at what goes together."""

from settings.checks import data, evaluation, model, optimizer, placement, run
from settings.schema import Settings


def check(settings: Settings, device_count: int | None = None) -> None:
    """Check combinations of settings, and that the files they name exist.

    device_count: accelerators visible here, 0 on a machine with CPUs only, None while that is not known; checks that
    need it are then left out.

    Raises:
        ValueError: the first thing found wrong, with what is allowed.
    """
    data.check(settings)
    model.check(settings)
    optimizer.check(settings)
    evaluation.check(settings)
    placement.check(settings, device_count)
    run.check(settings)
