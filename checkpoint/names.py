"""The names of a model's weights: without the wrappers of compilation and checkpointing, tied ones together, and what
files of other origin call them.
"""

import itertools
import re

import torch

# Buffers that earlier transformers kept in their state dicts and that are computed, not learned, today.
HARMLESS = re.compile(
    r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias|causal_mask|embed_positions|rotary_emb\.inv_freq)$"
    r"|(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)(embeddings|transformer|model)\.position_ids$"
    r"|(^|\.)decoder\.version$|(^|\.)embed_positions\.weights$"
)
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
# What DistributedDataParallel, DeepSpeed and Lightning put before every name.
OUTER_WRAPPERS = ("module.", "_forward_module.")
OTHER_NAMES = (("embed_out.", "lm_head."),)  # GPT-NeoX: in files, and in memory


def clean_name(name):
    """A parameter's name without what torch.compile and activation-checkpointing wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def clean_names(state):
    """A state dict under its model's own names, whatever wrappers it was saved through."""
    state = {clean_name(str(name)): value for name, value in state.items()}
    while outer := next((w for w in OUTER_WRAPPERS if state and all(name.startswith(w) for name in state)), None):
        state = {name.removeprefix(outer): value for name, value in state.items()}
    return state


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


# Heads that other tasks put on a language model, by the first part of their name.
OTHER_HEADS = ("score", "classifier", "classification_head", "qa_outputs", "regression_head")


def misfits(model, names) -> list[str]:
    """Those of stored tensors without a place in the model whose absence from it changes what it computes.

    These are: parts of modules that the model has (a bias that its configuration leaves out, a scale of quantised
    weights, an adapter that was not merged), layers beyond the configured number, and heads of other tasks. Buffers
    that are computed today, layers for predicting further tokens, and whole parts of another kind (a vision tower, a
    value head) are not.
    """
    modules = dict(model.named_modules())
    leaves = {name for name, module in modules.items() if not list(module.children())}
    prefix = getattr(model, "base_model_prefix", "") + "."
    ahead = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0

    def is_misfit(name):
        if HARMLESS.search(name):
            return False
        if name.partition(".")[0] in OTHER_HEADS:
            return True
        for full in (name, prefix + name):
            around = list(itertools.accumulate(full.split(".")[:-1], "{}.{}".format))  # outermost first
            if around and (around[-1] in modules or not leaves.isdisjoint(around)):
                return True
            numbered = re.match(r"(.+?)\.(\d+)\.", full)
            if numbered:
                layers = modules.get(numbered[1])
                if isinstance(layers, torch.nn.ModuleList) and int(numbered[2]) >= len(layers) + ahead:
                    return True
        return False

    return sorted(name for name in names if is_misfit(name))


def refuse_misfit(model, report, source):
    """Refuse weights that are not those of the model that a configuration describes.

    `report`: what from_pretrained gives with output_loading_info: missing_keys, unexpected_keys, and mismatched_keys as
    (name, shape in the file, shape in the model). Returns the names of stored tensors that are rightly left unread.
    Raises ValueError that names the missing, the extra and the misshapen tensors.
    """
    missing = sorted(report["missing_keys"])
    extra = misfits(model, report["unexpected_keys"])
    misshapen = [
        f"{name} {tuple(stored)} where the model has {tuple(wanted)}"
        for name, stored, wanted in sorted(report["mismatched_keys"], key=str)
    ]
    errors = [str(error) for error in report.get("error_msgs", ())]
    parts = [
        f"{what} ({len(keys)}): {listing(keys, 8)}"
        for what, keys in (("missing", missing), ("extra", extra), ("misshapen", misshapen), ("errors", errors))
        if keys
    ]
    if not parts:
        return sorted(name for name in set(report["unexpected_keys"]) if not HARMLESS.search(name))
    described = ", ".join(getattr(model.config, "architectures", None) or [type(model).__name__])
    raise ValueError(
        f"{source} does not hold the weights of the causal language model that is configured ({described}, "
        f"{getattr(model.config.get_text_config(), 'num_hidden_layers', '?')} layers). {'; '.join(parts)}. "
        "Give the complete model, with the config.json that belongs to its weights"
    )


def untied(source) -> ValueError:
    """The error for stored weights that differ although the configuration ties them."""
    return ValueError(
        f"{source}: config.json ties input and output embeddings (tie_word_embeddings: true), but the files hold two "
        "that differ. Set tie_word_embeddings to false in that config.json if both are meant, or remove the wrong one"
    )
