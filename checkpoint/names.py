"""The names of a model's weights: without the wrappers of compilation and checkpointing, tied ones together, and what
files of other origin call them.
"""

import re

import torch

# Buffers that earlier transformers kept in their state dicts and that are computed, not learned, today.
HARMLESS = re.compile(
    r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias|embed_positions|rotary_emb\.inv_freq)$"
    r"|(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)(embeddings|transformer|model)\.position_ids$"
)
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
OTHER_NAMES = (("embed_out.", "lm_head."),)  # GPT-NeoX: in files, and in memory


def clean_name(name):
    """A parameter's name without what torch.compile and activation-checkpointing wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_tensors(model):
    """Returns [(names, tensor)]: each parameter and persistent buffer once, with all its names (tied weights: several).

    Goes through state_dict() because FSDP2 hooks into it: what it returns is sharded, even after an evaluation.
    """
    by_identity: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            by_identity.setdefault(id(tensor), ([], tensor))[0].append(clean_name(name))
    return list(by_identity.values())


def listing(names, most=20):
    names = list(names)
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def check_keys(model, state, source="the archive"):
    """Returns the state with exactly the keys of `model.state_dict()`, ready for a strict load_state_dict.

    A name of tied weights that is missing is filled from its twin, computed buffers of older files are dropped.
    Raises ValueError that lists the missing, the extra and the misshapen keys.
    """
    tensors = named_tensors(model)
    expected = {name for names, _ in tensors for name in names}
    state = dict(state)
    for theirs, ours in (*OTHER_NAMES, *(pair[::-1] for pair in OTHER_NAMES)):
        for key in [key for key in state if key.startswith(theirs) and key not in expected]:
            if (renamed := ours + key.removeprefix(theirs)) in expected:
                state[renamed] = state.pop(key)
    fitted, missing, misshapen = {}, [], []
    for names, tensor in tensors:
        given = [(name, state.pop(name)) for name in names if name in state]
        if not given:
            missing.append(" = ".join(names))
            continue
        name, value = given[0]
        if tuple(value.shape) != tuple(tensor.shape):
            misshapen.append(f"{name} {tuple(value.shape)} where the model has {tuple(tensor.shape)}")
        elif any(other.data_ptr() != value.data_ptr() and not torch.equal(other, value) for _, other in given[1:]):
            misshapen.append(f"{' and '.join(n for n, _ in given)} differ, but are one weight in the model (tied)")
        fitted.update(dict.fromkeys(names, value))
    extra = [key for key in state if not HARMLESS.search(key)]
    if missing or misshapen or extra:
        parts = [
            f"{what} ({len(keys)}): {listing(keys)}"
            for what, keys in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
            if keys
        ]
        raise ValueError(
            f"{source} does not fit the model, nothing was loaded. "
            + "; ".join(parts)
            + ". Give the model (model.name_or_path) that it was trained from"
        )
    return fitted
