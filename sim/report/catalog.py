"""What comes with servesim, as rows: models, GPUs, policies."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from sim.doors.base import DOORS
from sim.gpu import gpus
from sim.model import models
from sim.options import Options
from sim.policies.base import POLICIES, EngineOptions, Policy
from sim.policies.grid.pacing import PACINGS
from sim.queues.base import QUEUE_ORDERS
from sim.registry import Registry
from sim.routing.base import ROUTING

GIB = 2**30


def model_rows() -> list[dict[str, Any]]:
    """One row per bundled model. KV bytes per token are those of 16-bit KV without tensor parallelism."""
    return [
        {
            "model": model.name,
            "billion_params": round(model.num_parameters / 1e9, 2),
            "layers": model.num_hidden_layers,
            "heads": model.num_attention_heads,
            "kv_heads": model.num_key_value_heads,
            "weights_gib": round(model.weight_bytes() / GIB, 1),
            "kv_bytes_per_token": model.kv_bytes_per_token(model.dtype_bytes),
            "max_model_len": model.max_position_embeddings,
        }
        for model in models()
    ]


def gpu_rows() -> list[dict[str, Any]]:
    """One row per bundled GPU: vendor peaks, dense."""
    return [
        {
            "gpu": gpu.name,
            "memory_gib": round(gpu.memory_bytes / GIB, 1),
            "bandwidth_tb_per_s": round(gpu.bandwidth_bytes_per_s / 1e12, 3),
            "bf16_tflops": round(gpu.bf16_flops / 1e12, 1),
            "fp8_tflops": None if gpu.fp8_flops is None else round(gpu.fp8_flops / 1e12, 1),
            "link_gb_per_s": round(gpu.link_bytes_per_s / 1e9, 1),
        }
        for gpu in gpus()
    ]


def policy_rows(only: str | None = None) -> list[dict[str, Any]]:
    """One row per policy, or that of one: what it says of itself, and its options beyond those of every engine.

    Raises ScenarioError for a policy that there is not.
    """
    policies = {name: POLICIES.load(name, place="POLICY") for name in ([only] if only else POLICIES)}
    return [
        {
            "policy": name,
            **policy.about._asdict(),
            "axes": _axes(policy),
            "options": _option_rows(policy.Options, beyond=EngineOptions),
        }
        for name, policy in policies.items()
    ]


def _axes(policy: type[Policy]) -> dict[str, str]:
    axes = policy.axes()
    return axes._asdict() if axes else {}


def engine_option_rows() -> list[dict[str, Any]]:
    """One row per option that every policy has."""
    return [row for row in _option_rows(EngineOptions) if row["option"] != "policy"]


def kind_rows() -> dict[str, list[dict[str, Any]]]:
    """What the options that name a kind can be, by the option: a row per kind, and one for each option of its own."""
    families: dict[str, Registry[Any]] = {
        "queue_order": QUEUE_ORDERS,
        "prefill_pacing": PACINGS,
        "admission_control": DOORS,
        "fleet.router": ROUTING,
    }
    return {option: [row for kind in family for row in _rows_of(kind, family)] for option, family in families.items()}


def _rows_of(kind: str, family: Registry[Any]) -> list[dict[str, Any]]:
    rows = {row["option"]: row for row in _option_rows(family.load(kind).Options)}
    head = {"kind": kind, "option": "", "default": "", "meaning": rows.pop("kind")["meaning"]}
    return [head, *({"kind": "", **row} for row in rows.values())]


def _option_rows(options: type[Options], beyond: type[Options] | None = None) -> list[dict[str, Any]]:
    known = beyond.model_fields if beyond else ()
    return [
        {"option": name, "default": _default(field), "meaning": field.description}
        for name, field in options.model_fields.items()
        if name not in known
    ]


def _default(field: FieldInfo) -> Any:
    """What an option is if nothing is said: for options of their own their kind, for an empty list or table nothing."""
    if field.is_required():
        return None
    default = field.get_default(call_default_factory=True)
    if isinstance(default, (tuple, dict)):
        return ", ".join(map(str, default)) or None
    return getattr(default, "kind", default)
