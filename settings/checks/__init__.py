"""The checks of a run's settings: `keys` looks at each value alone, the others at what goes together."""

from collections.abc import Collection

from settings.checks import data, evaluation, model, optimizer, placement, run, unused
from settings.schema import Settings


def check(settings: Settings, device_count: int | None = None, given: Collection[str] = ()) -> None:
    """Check combinations of settings, and that the files they name exist.

    device_count: accelerators visible here, 0 on a machine with CPUs only, None while that is not known; checks that
    need it are then left out. given: keys that this command names, for the checks of unused.py.

    Raises:
        ValueError: the first thing found wrong, with what is allowed.
    """
    data.check(settings)
    model.check(settings)
    optimizer.check(settings)
    evaluation.check(settings)
    world = placement.check(settings, device_count)
    run.check(settings)
    unused.check(settings, given, world)
