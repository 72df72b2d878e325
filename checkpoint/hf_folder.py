"""Writing weights as a Hugging Face folder."""

import contextlib
import copy
import shutil
from pathlib import Path

from data.text_encoding import end_of_turn_id


@contextlib.contextmanager
def _plain_config(model, tokenizer):
    """For a while, gives the model a config and a generation config that describe plain, unquantised weights, whose
    texts end as they were trained to end."""
    original, quantizer = (model.config, model.generation_config), vars(model).pop("hf_quantizer", None)
    config, generation = copy.deepcopy(original[0]), copy.deepcopy(original[1])
    for key in ("quantization_config", "distributed_config"):
        if hasattr(config, key):
            delattr(config, key)
    try:
        if generation is not None:
            generation.eos_token_id = _stop_ids(generation.eos_token_id, tokenizer)
            try:
                generation.validate(strict=True)
            except ValueError:  # a temperature with do_sample false, as many models carry, is refused on saving
                generation.do_sample = True
        model.config, model.generation_config = config, generation
        yield
    finally:
        model.config, model.generation_config = original
        if quantizer is not None:
            model.hf_quantizer = quantizer


def _stop_ids(known, tokenizer):
    """eos_token_id of a generation config: what it was, the tokenizer's EOS, and the end of a turn in its template."""
    if tokenizer is None:
        return known
    ids = list(known) if isinstance(known, (list, tuple)) else [known]
    trained = tokenizer.eos_token_id, end_of_turn_id(tokenizer)
    ids = list(dict.fromkeys(number for number in (*ids, *trained) if number is not None))
    return ids[0] if len(ids) == 1 else ids or None


def write_hf_folder(model, state, tokenizer, folder):
    """Writes a folder that opens with AutoModelForCausalLM and AutoTokenizer, in the dtype of the model and the state.

    `model` gives the names and the config (it may be sharded or on the meta device), `state` {name: full CPU tensor}
    the weights; `tokenizer` may be None. Touches no other process.
    """
    if not hasattr(model, "save_pretrained"):
        raise ValueError(
            f"a {type(model).__name__} is no transformers model and has no Hugging Face form: "
            "leave 'hf' out of checkpoint.formats"
        )
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with _plain_config(model, tokenizer):
            model.save_pretrained(folder, state_dict=dict(state))
    finally:
        logging.enable_progress_bar() if bar else None
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for file in Path(folder).glob("*.safetensors"):  # safetensors makes them readable by their owner only
        shutil.copymode(Path(folder) / "config.json", file)
