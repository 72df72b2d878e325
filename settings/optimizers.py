"""The optimizers of torch.optim that a run can have, and the implementation of each that it uses."""

from typing import Any

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


def optimizer_arguments(config: Settings, kind: str) -> dict[str, Any]:
    """Keyword arguments of the run's optimizer on a kind of device.

    On a GPU all parameters are stepped in one kernel (fused) or a few (foreach) where the user leaves the choice.
    torch itself does so for plain tensors only and takes sharded ones one by one, which costs more time than their
    arithmetic.
    """
    arguments = dict(config.optimizer_kwargs)
    chosen = any(arguments.get(name) is not None for name in ("fused", "foreach"))
    if kind == "cuda" and not chosen:
        arguments["fused" if "fused" in OPTIMIZERS[config.optimizer].split() else "foreach"] = True
    return arguments
