"""Checks of the optimizer and its arguments."""

from settings.key import is_number
from settings.messages import near_miss, show
from settings.schema import Settings

# torch.optim without those that need a closure (LBFGS), sparse gradients (SparseAdam) or only matrices (Muon), and
# without arguments that make no sense here (lr is a key of its own; maximize, differentiable). A test holds this
# against torch itself.
OPTIMIZERS = {
    "ASGD": "lambd alpha t0 weight_decay foreach capturable",
    "Adadelta": "rho eps weight_decay foreach capturable",
    "Adafactor": "beta2_decay eps d weight_decay foreach",
    "Adagrad": "lr_decay weight_decay initial_accumulator_value eps foreach fused",
    "Adam": "betas eps weight_decay amsgrad foreach capturable fused decoupled_weight_decay",
    "AdamW": "betas eps weight_decay amsgrad foreach capturable fused",
    "Adamax": "betas eps weight_decay foreach capturable",
    "NAdam": "betas eps weight_decay momentum_decay decoupled_weight_decay foreach capturable",
    "RAdam": "betas eps weight_decay decoupled_weight_decay foreach capturable",
    "RMSprop": "alpha eps weight_decay momentum centered foreach capturable",
    "Rprop": "etas step_sizes foreach capturable",
    "SGD": "momentum dampening weight_decay nesterov foreach fused",
}
# Their steps use operations that DTensor does not have.
WHOLE_TENSORS_ONLY = ("Adafactor", "Rprop")
_FLAGS = "amsgrad foreach capturable fused decoupled_weight_decay centered nesterov".split()
_PAIRS = ("betas", "etas", "step_sizes")


def check(settings: Settings) -> None:
    name = settings.optimizer
    if name not in OPTIMIZERS:
        why = {
            "LBFGS": " (LBFGS needs the loss several times a step)",
            "SparseAdam": " (SparseAdam needs sparse gradients)",
            "Muon": " (Muon takes matrices only)",
        }.get(name, "")
        raise ValueError(
            f"optimizer={name} is not one that can be used here{why}; allowed: {', '.join(OPTIMIZERS)}"
            + near_miss(name, OPTIMIZERS)
        )
    known = OPTIMIZERS[name].split()
    for key, value in settings.optimizer_kwargs.items():
        full = f"optimizer_kwargs.{key}"
        if key == "lr":
            raise ValueError("optimizer_kwargs.lr: the learning rate is a key of its own; use lr=...")
        if key not in known:
            raise ValueError(f"{full}: {name} has no such argument; it has {', '.join(known)}" + near_miss(key, known))
        if key in _FLAGS:
            good, allowed = isinstance(value, bool) or value is None, "true or false"
        elif key in _PAIRS or (name == "Adafactor" and key == "eps"):
            good = isinstance(value, list) and len(value) == 2 and all(v is None or is_number(v) for v in value)
            allowed = "a list of two numbers"
        else:
            negative = key == "beta2_decay"  # an exponent
            good, allowed = is_number(value) and (value >= 0 or negative), "a number from 0 up"
        if key == "betas" and good:
            good, allowed = all(0 <= beta < 1 for beta in value), "a list of two numbers from 0 and below 1"
        if not good:
            raise ValueError(f"{full}={show(value)} is not allowed; allowed: {allowed}")
    arguments = settings.optimizer_kwargs
    if arguments.get("fused") and arguments.get("foreach"):
        raise ValueError("optimizer_kwargs.fused and optimizer_kwargs.foreach exclude each other; set one of them")
    if arguments.get("nesterov") and not (arguments.get("momentum") and not arguments.get("dampening")):
        raise ValueError("optimizer_kwargs.nesterov=true needs optimizer_kwargs.momentum above 0 and no dampening")
    if settings.fsdp.cpu_offload:
        for key in ("fused", "capturable"):
            if arguments.get(key):
                raise ValueError(
                    f"optimizer_kwargs.{key}=true steps on the accelerator, and fsdp.cpu_offload=true "
                    "keeps the parameters in host memory; set one of them to false"
                )
