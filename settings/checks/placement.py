"""Checks of trainer, devices and how the model is split over them."""

import re

import utils
from settings.checks.common import refuse_change
from settings.messages import near_miss
from settings.optimizers import OPTIMIZERS, WHOLE_TENSORS_ONLY
from settings.precision import asked_precision, mixed_dtype
from settings.schema import FsdpSettings, Settings, keys_in
from settings.shard_layout import layout_of, world_size_of

_FSDP_KEYS = keys_in(FsdpSettings, "fsdp.")


def check(settings: Settings, device_count: int | None) -> int | None:
    """Returns the number of processes; None while it is not known."""
    trainer, device = settings.trainer, settings.device
    if device is not None and not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise ValueError(
            f"device={device} is not allowed; allowed: cpu, cuda, cuda:N, mps or null"
            + near_miss(device, ["cpu", "cuda", "mps"])
        )
    kind = (device or "").split(":")[0] or ("cpu" if device_count == 0 else "")  # empty: not known yet
    if device_count is not None and kind == "cuda":
        index = int((device or "").partition(":")[2] or 0)
        if index >= device_count:
            devices = "is 1 CUDA device" if device_count == 1 else f"are {device_count} CUDA devices"
            raise ValueError(f"device={device}: there {devices} here{'' if device_count else '; use device=cpu'}")
    if device_count == 0 and kind == "mps":
        raise ValueError("device=mps: there is no MPS device here; use device=cpu")
    if kind == "cpu":
        for key, dtype in (
            ("model.fsdp_policy_mp", settings.model.fsdp_policy_mp),
            ("precision", settings.precision),
            ("model.reference_dtype", settings.model.reference_dtype),
            ("fsdp.reduce_dtype", settings.fsdp.reduce_dtype),
        ):
            if dtype == "float16":
                raise ValueError(f"{key}=float16 needs a GPU: on a CPU use bfloat16 or float32")
        if settings.model.attention == "flex":
            raise ValueError("model.attention=flex needs CUDA; on a CPU use packed_sdpa or auto")
    elif kind == "mps" and settings.model.attention == "flex":
        raise ValueError("model.attention=flex needs CUDA; on mps use packed_sdpa or auto")

    _check_precision(settings, kind)
    if kind in ("cpu", "mps") and settings.optimizer_kwargs.get("capturable"):
        raise ValueError(f"optimizer_kwargs.capturable=true needs CUDA; on {kind} leave it out")

    world = settings.world_size
    joined = utils.joined_world()
    if joined is not None:
        if world is not None and world != joined[1]:
            raise ValueError(
                f"world_size={world}, but {joined[3]} started {joined[1]} processes; leave world_size=null"
            )
        if settings.fsdp_port is not None:
            raise ValueError(
                f"fsdp_port={settings.fsdp_port}: under {joined[3]} the meeting point comes from "
                "MASTER_ADDR and MASTER_PORT; leave fsdp_port=null"
            )
        world = joined[1]
    if trainer == "BasicTrainer":
        if settings.tp_size > 1:
            raise ValueError(
                f"tp_size={settings.tp_size} splits matrices over devices, and trainer=BasicTrainer trains on one: add "
                "trainer=TensorParallelTrainer, or leave tp_size=1"
            )
        if world is not None and world > 1:
            raise ValueError(
                f"world size {world}: BasicTrainer trains on one device; choose trainer=FSDPTrainer or "
                "trainer=TensorParallelTrainer" + ("" if joined else ", or world_size=1")
            )
        for key in ("fsdp_port", *_FSDP_KEYS):
            why = "trainer=BasicTrainer holds the whole model on one device; it belongs to trainer=FSDPTrainer"
            refuse_change(settings, key, why)
        if mixed_dtype(settings) and settings.optimizer in WHOLE_TENSORS_ONLY:
            raise ValueError(
                f"precision={asked_precision(settings)}: optimizer={settings.optimizer} cannot work on the parameters "
                "that are cast for it (it needs whole tensors); use precision=float32, or another optimizer"
            )
        return 1
    if kind == "mps":
        raise ValueError(f"trainer={trainer} runs on cuda and cpu; for device=mps use trainer=BasicTrainer")
    if device and ":" in device:
        raise ValueError(
            f"device={device}: trainer={trainer} uses all visible devices; write device=cuda, and choose "
            "among them with CUDA_VISIBLE_DEVICES"
        )
    if world is None and device_count is not None:
        world = world_size_of(settings, kind or "cuda", device_count)
    if kind == "cuda" and device_count is not None and not joined and world is not None and world > device_count:
        raise ValueError(
            f"world_size={world}, but only {device_count} CUDA devices are visible here; there is one process a device"
        )
    _check_sharding(settings, world)
    return world


def _check_precision(settings: Settings, kind: str) -> None:
    older, asked = settings.model.fsdp_policy_mp, settings.precision
    if older and asked not in ("auto", older):
        raise ValueError(
            f"model.fsdp_policy_mp={older} and precision={asked} are one key under two names and differ; "
            "set only precision"
        )
    if asked == "tf32" and kind in ("cpu", "mps"):
        raise ValueError(f"precision=tf32 is a mode of NVIDIA GPUs; on {kind} use precision=float32 or auto")
    if kind == "mps" and mixed_dtype(settings):
        raise ValueError(
            f"precision={asked_precision(settings)} needs CUDA or a CPU; on mps leave precision=auto, or keep the "
            "weights themselves in bfloat16 with model.policy_dtype=bfloat16"
        )


def _check_sharding(settings: Settings, world: int | None) -> None:
    """Combinations of a sharded trainer; `world` is None while it is not known."""
    if settings.optimizer in WHOLE_TENSORS_ONLY:
        usable = [name for name in OPTIMIZERS if name not in WHOLE_TENSORS_ONLY]
        raise ValueError(
            f"optimizer={settings.optimizer} cannot work on sharded parameters (its computation needs whole "
            f"tensors); use trainer=BasicTrainer, or one of {', '.join(usable)}"
        )
    trainer, strategy, tp = settings.trainer, settings.fsdp.sharding_strategy, settings.tp_size
    if trainer == "FSDPTrainer" and tp > 1:
        raise ValueError(
            f"tp_size={tp} needs trainer=TensorParallelTrainer, which also shards over the devices that "
            "tp_size leaves (world_size / tp_size)"
        )
    if trainer == "TensorParallelTrainer":
        if tp == 1 and world is not None and (world > 1 or settings.world_size is None):
            divisor = next((n for n in range(2, world + 1) if world % n == 0), None)
            raise ValueError(
                "trainer=TensorParallelTrainer needs tp_size of 2 or more, and as many processes or a multiple: "
                + (f"of the {world} here, add tp_size={divisor}" if divisor else "add tp_size=2 world_size=2")
                + "; to shard without splitting matrices choose trainer=FSDPTrainer"
            )
        if strategy == "HYBRID_SHARD":
            raise ValueError(
                "fsdp.sharding_strategy=HYBRID_SHARD does not go with TensorParallelTrainer; use "
                "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
            )
        if world == tp:
            for key in _FSDP_KEYS:
                refuse_change(
                    settings,
                    key,
                    f"tp_size={tp} takes the whole world of {world} processes, so that none are left to shard over",
                )
    replicas = settings.fsdp.replicas
    if strategy != "HYBRID_SHARD" and replicas is not None:
        raise ValueError(f"fsdp.replicas={replicas} needs fsdp=hybrid_shard; {strategy} decides the copies itself")
    if world is None:
        return
    ranks = layout_of(settings, world).data_ranks
    if settings.batch_size < ranks:
        raise ValueError(
            f"batch_size={settings.batch_size} is less than the {ranks} processes that share it, which "
            f"would leave some without an example; use batch_size={ranks} or more, or fewer processes"
        )
