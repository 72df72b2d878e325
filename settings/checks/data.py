"""Checks of the data sets, batches and the length of training."""

from datetime import datetime

from data.dataset_names import key_of
from losses import find_loss
from settings.checks.common import looks_like_path, must_exist, refuse_change
from settings.key import is_number
from settings.messages import near_miss, show
from settings.schema import DataSettings, Settings


def check(settings: Settings) -> None:
    if settings.loss.name != "sft":
        refuse_change(settings, "data.train_on", f"loss={settings.loss.name} learns the last response of a row")
    if settings.loss.name == "sft":
        for key in ("data.pairs", "data.min_score_gap"):
            refuse_change(settings, key, "loss=sft learns the best response of a ranking, and no pairs")
    _check_streaming(settings)
    if not settings.datasets:
        raise ValueError("datasets=[] names no data: give at least one, such as datasets=[hh]")
    for name in settings.datasets:
        if settings.datasets.count(name) > 1:
            advice = key_of("data.weights", name, settings.datasets, 2)
            raise ValueError(f"datasets names {name} twice; to draw it more often use {advice}")
    for name, path in settings.data.paths.items():
        _must_be_named(settings, "data.paths", name)
        if not isinstance(path, str) or not path:
            raise ValueError(f"data.paths.{name}={show(path)} is not allowed; allowed: a path")
        moved = f". If it was moved: {key_of('data.paths', name, settings.datasets, 'NEW_PATH')}"
        given = key_of("data.paths", name, settings.datasets, path)
        must_exist("data.paths", path, given, moved if settings.resume else "")
    for name, weight in settings.data.weights.items():
        _must_be_named(settings, "data.weights", name)
        if not is_number(weight) or weight <= 0:
            key = key_of("data.weights", name, settings.datasets, show(weight))
            raise ValueError(f"{key} is not allowed; allowed: a number above 0")
    for name, column in settings.data.columns.items():
        if isinstance(column, dict):
            _must_be_named(settings, "data.columns", name)
    if settings.data.chat_template and looks_like_path(settings.data.chat_template):
        must_exist("data.chat_template", settings.data.chat_template)
    _check_layout(settings.data)
    if settings.max_prompt_length >= settings.max_length:
        raise ValueError(
            f"max_prompt_length={settings.max_prompt_length} leaves no room for a response within "
            f"max_length={settings.max_length}; set max_prompt_length below max_length"
        )
    if settings.n_epochs is None and settings.n_examples is None:
        raise ValueError("n_epochs and n_examples are both null, so the run would never end; set one of them")
    if settings.gradient_accumulation_steps > settings.batch_size:
        raise ValueError(
            f"gradient_accumulation_steps={settings.gradient_accumulation_steps} is more than "
            f"batch_size={settings.batch_size}: a pass needs an example at least"
        )
    from data import sources  # here, because a mistake found before this point is reported sooner without it

    sources.check_dataset_names(settings.datasets, settings)


def _check_streaming(settings: Settings) -> None:
    if not settings.data.streaming:
        refuse_change(settings, "data.shuffle_window", "data.streaming=false shuffles all examples of an epoch")
        return
    why = "data.streaming=true"
    if settings.n_epochs is not None or settings.n_examples is None:
        raise ValueError(
            f"{why} does not know how many examples there are: give the length of the run as n_examples=N with "
            "n_epochs=null"
        )
    loss = find_loss(settings.loss.name, settings.loss.options)
    if loss.needs_reference(settings.loss.options) and settings.reference.mode == "cached":
        raise ValueError(
            f"{why} sees each example only when it is trained, so that no reference log-prob can be computed "
            "before: set reference.mode=online"
        )
    if settings.show is not None:
        raise ValueError(f"show looks at whole data sets: leave {why} out")
    refuse_change(settings, "data.test_fraction", f"{why} holds nothing out: held-out data come from a test split")


def _check_layout(data: DataSettings) -> None:
    if data.apply_template and data.allow_control_tokens:
        raise ValueError(
            "data.allow_control_tokens=true has no effect with data.apply_template=true: the chat template alone "
            "writes control tokens then. Leave one of them false"
        )
    if data.template_date is not None:
        try:
            datetime.strptime(data.template_date, "%Y-%m-%d")
        except ValueError:
            raise ValueError(
                f"data.template_date={data.template_date} is not allowed; allowed: a date YYYY-MM-DD or null"
            ) from None


def _must_be_named(settings: Settings, key: str, name: str) -> None:
    if name not in settings.datasets:
        raise ValueError(
            f"{key}.{name}: {name} is not among datasets={show(settings.datasets)}" + near_miss(name, settings.datasets)
        )
