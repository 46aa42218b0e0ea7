# SPDX-License-Identifier: MIT
"""What a checkpoint or the command line says about quantisation and serving, parsed and checked.

A calibrated checkpoint's ``quantization_config`` has ``config_groups``. Without them the
checkpoint is bf16 or MXFP4 and is quantised while it loads; OnlineOptions then come from
``--additional-config '{"oss_fused": {...}}'`` and from the same keys in ``--hf-overrides
'{"quantization_config": {"quant_method": "oss_fp8", ...}}'``; an option that both name is that of
the first. ServingOptions come from
``--additional-config`` only, and hold for every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from oss_fused.errors import SchemeError
from oss_fused.quant.scheme import (
    FP8_DYNAMIC,
    QuantizationArgs,
    QuantizationScheme,
    preset,
)

QUANT_METHOD = "oss_fp8"
FORMAT_VERSION = 1
LONGEST_BURST = 16
MXFP4_METHODS = ("mxfp4", "gpt_oss_mxfp4")

ExpertsLayout = Literal["mxfp4", "fp8", "bf16"]


class OnlineOptions(BaseModel):
    """Options of a checkpoint that is quantised while it loads.

    Attributes:
        scheme: preset name: FP8_DYNAMIC or W8A16.
        ignore: patterns of layers left as they are.
        lm_head: quantise the head; by default only gpt-oss does.
        experts: "keep" leaves gpt-oss experts as they are stored, "fp8" quantises bf16 ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheme: str = "FP8_DYNAMIC"
    ignore: tuple[str, ...] = ()
    lm_head: StrictBool | None = None
    experts: Literal["keep", "fp8"] = "keep"

    @field_validator("scheme")
    @classmethod
    def _known_without_data(cls, name: str) -> str:
        if preset(name).needs_data:
            raise ValueError(
                f"scheme={name!r}: static activation scales need calibration: run "
                f"scripts/calibrate.py and serve its output"
            )
        return name


class ServingOptions(BaseModel):
    """How a model is served, whatever its checkpoint; docs/serving.md says it to users.

    A new option is a field here and a row there: the command line, its errors and vLLM's
    compile-cache key follow.

    Attributes:
        expert_kernels: kernels of MXFP4 and FP8 experts: "auto" takes native ones (of this package)
            where they measure faster, "native" always, "vllm" never.
        expert_activations: of native MXFP4 experts: "bf16" keeps them, "fp8" quantises them in
            steps of 256 tokens and more, "auto" in steps of 512 and more.
        linear_activations: of FP8 linear layers that quantise per token: "bf16" has two levels of
            codes, as exact as bf16, in steps of up to 8 tokens on a Hopper GPU, "fp8" one. Gate
            and up projections, and the fused MLP of dense models, always have one.
        attention_kernels: "auto" runs decode attention, and prompts in short windows, in native
            kernels where they apply; "vllm" leaves all attention to vLLM's backend.
        all_reduce_kernels: "auto" sums over tensor-parallel ranks in this package's kernel where it
            applies; "vllm" leaves all sums to vLLM.
        fused_layers: use the fused decoder layers and the joined RoPE and cache kernel; without,
            vLLM's model classes.
        short_step: fewer host operations per step (plugin/model_state.py, plugin/scheduler.py,
            larger CUDA graphs); without, as vLLM.
        burst: decode steps in one engine step (plugin/burst.py): "auto" takes what hides the host
            from the device within 5 ms.
        self_check: compare log-probabilities of fixed prompts with those in the checkpoint when the
            server starts (plugin/self_check.py).
        monitor_every: sample the inputs of FP8 layers in one step in so many; 0 disables.
        monitor_policy: file that lists layers to serve with 16-bit activations; the monitor adds
            to it.
        monitor_fallback: when a layer that saturates is switched: "restart" leaves it to the next
            start, "now" lets the server go on with it, uncompiled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    expert_kernels: Literal["auto", "native", "vllm"] = "auto"
    expert_activations: Literal["auto", "bf16", "fp8"] = "auto"
    linear_activations: Literal["bf16", "fp8"] = "bf16"
    attention_kernels: Literal["auto", "vllm"] = "auto"
    all_reduce_kernels: Literal["auto", "vllm"] = "auto"
    fused_layers: bool = True
    short_step: bool = True
    burst: int | str = "auto"
    self_check: bool = False
    monitor_every: Annotated[int, Field(ge=0)] = 0
    monitor_policy: Annotated[str, Field(min_length=1)] | None = None
    monitor_fallback: Literal["restart", "now"] = "restart"

    @field_validator("burst", mode="before")
    @classmethod
    def _length_of_a_burst(cls, value: Any) -> Any:
        if value == "auto" or (type(value) is int and 1 <= value <= LONGEST_BURST):
            return value
        raise ValueError(f"expected 'auto' or a whole number from 1 to {LONGEST_BURST}")

    @model_validator(mode="after")
    def _bursts_need_our_scheduler(self) -> ServingOptions:
        asked = "burst" in self.model_fields_set
        if asked and self.burst != 1 and not self.short_step:
            raise ValueError(
                f"burst={self.burst!r} with short_step=False: expected short_step=True"
            )
        return self

    @model_validator(mode="after")
    def _a_fallback_needs_the_monitor(self) -> ServingOptions:
        if self.monitor_fallback == "now" and not (self.monitor_every and self.monitor_policy):
            raise ValueError(
                f"monitor_fallback='now' with monitor_every={self.monitor_every} and "
                f"monitor_policy={self.monitor_policy!r}: expected a number of steps and a file"
            )
        return self


class Settings(BaseModel):
    """How a model is quantised and served.

    Attributes:
        calibrated: the checkpoint holds FP8 weights and scales.
        groups: name -> scheme.
        targets: name -> patterns of the layers of that group.
        ignore: patterns of layers left unquantised.
        lm_head: quantise the head; None lets the model decide.
        kv_cache_scheme: of the checkpoint's ``k_scale`` / ``v_scale``, None without.
        experts: how the checkpoint stores MoE experts.
        quantize_experts: turn bf16 experts into FP8 while loading.
        online: the options that those above follow from, of a checkpoint that is quantised while it
            loads.
        serving: the options that hold for every checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calibrated: bool
    groups: dict[str, QuantizationScheme]
    targets: dict[str, tuple[str, ...]]
    ignore: tuple[str, ...] = ()
    lm_head: bool | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    experts: ExpertsLayout = "bf16"
    quantize_experts: bool = False
    online: OnlineOptions = OnlineOptions()
    serving: ServingOptions = ServingOptions()


class _Group(BaseModel):
    """One of a checkpoint's ``config_groups``; keys of other tools are passed over."""

    targets: tuple[str, ...] = ()
    weights: QuantizationArgs = FP8_DYNAMIC.weights
    input_activations: QuantizationArgs | None = None


class _Stored(BaseModel):
    """What a calibrated checkpoint says of its linear layers."""

    config_groups: dict[str, _Group]
    ignore: tuple[str, ...] | None = None
    kv_cache_scheme: QuantizationArgs | None = None


def online(options: OnlineOptions, experts: ExpertsLayout = "bf16") -> Settings:
    """Settings of a bf16 or MXFP4 checkpoint.

    Raises:
        SchemeError: the options ask for FP8 experts of an MXFP4 checkpoint.
    """
    if options.experts == "fp8" and experts != "bf16":
        raise SchemeError(
            f"experts='fp8': the checkpoint's experts are {experts}, half the size of FP8; "
            f"expected 'keep', or a conversion by scripts/calibrate.py --experts fp8"
        )
    return Settings(
        calibrated=False,
        groups={"online": preset(options.scheme)},
        targets={"online": ("Linear",)},
        ignore=options.ignore,
        lm_head=options.lm_head,
        experts=experts,
        quantize_experts=options.experts == "fp8",
        online=options,
    )


def from_checkpoint(config: Mapping[str, Any]) -> Settings:
    """Settings of a checkpoint's ``quantization_config``.

    Raises:
        SchemeError: the version is newer than this package, or a key has a value that is not
            understood.
    """
    method = config.get("quant_method")
    if method in MXFP4_METHODS:
        # its modules_to_not_convert lists what is not MXFP4, which is what becomes FP8 here
        return online(OnlineOptions(), experts="mxfp4")
    if method != QUANT_METHOD:
        raise SchemeError(
            f"quantization_config.quant_method={method!r}: expected {QUANT_METHOD!r} or one of "
            f"{', '.join(MXFP4_METHODS)}"
        )
    try:
        if "config_groups" in config:
            return _calibrated(config)
        known = {key: config[key] for key in config if key not in ("quant_method", "version")}
        return online(OnlineOptions.model_validate(known))
    except ValidationError as error:
        raise SchemeError(f"quantization_config: {_details(error)}") from None


def _details(error: ValidationError) -> str:
    return "; ".join(
        # what concerns several options names them itself
        f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" if e["loc"] else e["msg"]
        for e in error.errors()
    )


def _calibrated(config: Mapping[str, Any]) -> Settings:
    version = config.get("version")
    if version != FORMAT_VERSION:
        raise SchemeError(
            f"quantization_config.version={version!r}: this package reads version "
            f"{FORMAT_VERSION}; install the oss-fused that wrote the checkpoint"
        )
    stored = _Stored.model_validate(config)
    return Settings(
        calibrated=True,
        groups={
            name: QuantizationScheme(
                weights=group.weights, input_activations=group.input_activations
            )
            for name, group in stored.config_groups.items()
        },
        targets={name: group.targets for name, group in stored.config_groups.items()},
        ignore=stored.ignore or (),
        kv_cache_scheme=_kv_scheme(stored.kv_cache_scheme),
        experts=config.get("experts") or "bf16",
    )


def _kv_scheme(scheme: QuantizationArgs | None) -> dict[str, Any] | None:
    if scheme is None:
        return None
    if scheme.strategy != "tensor":
        raise SchemeError(
            f"kv_cache_scheme.strategy={scheme.strategy!r}: expected 'tensor' (one k_scale and "
            f"one v_scale a layer)"
        )
    return scheme.model_dump(mode="json")


def parse_options(raw: Any) -> tuple[OnlineOptions | None, ServingOptions]:
    """The options of ``--additional-config '{"oss_fused": raw}'``; None for no OnlineOptions.

    Raises:
        SchemeError: names an unknown option, or an option with a bad value.
    """
    where = "additional_config['oss_fused']"
    if raw is None:
        return None, ServingOptions()
    known = (*OnlineOptions.model_fields, *ServingOptions.model_fields)
    if not isinstance(raw, Mapping):
        raise SchemeError(f"{where}={raw!r}: expected an object with some of {', '.join(known)}")
    unknown = [name for name in raw if name not in known]
    if unknown:
        raise SchemeError(f"{where}: no option {unknown[0]!r}; expected some of {', '.join(known)}")
    serving = {name: raw[name] for name in raw if name in ServingOptions.model_fields}
    quantising = {name: raw[name] for name in raw if name not in serving}
    try:
        online = OnlineOptions.model_validate(quantising) if quantising else None
        return online, ServingOptions.model_validate(serving)
    except ValidationError as error:
        raise SchemeError(f"{where}: {_details(error)}") from None


def with_options(settings: Settings, raw: Any) -> Settings:
    """Settings with the options of ``--additional-config '{"oss_fused": raw}'`` applied.

    Raises:
        SchemeError: unknown option or value, or an option that a calibrated checkpoint fixes.
    """
    options, serving = parse_options(raw)
    if options is not None:
        if settings.calibrated:
            names = ", ".join(sorted(options.model_fields_set))
            raise SchemeError(
                f"additional_config['oss_fused']={raw!r}: a calibrated checkpoint fixes its own "
                f"scheme; expected none of {names}"
            )
        # over those of --hf-overrides, option by option
        named = {name: getattr(options, name) for name in options.model_fields_set}
        settings = online(settings.online.model_copy(update=named), settings.experts)
    return settings.model_copy(update={"serving": serving})
