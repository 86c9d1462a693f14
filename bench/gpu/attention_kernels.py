"""Runs `knapformer calibrate` for each model with each attention kernel that torch and diffusers have here.

A kernel is present if it computes two sequences, forward and backward, on the device in the models' dtype. An absent
kernel is reported with its own error as the reason. Nothing is downloaded: diffusers' kernels from the hub, which
diffusers would fetch, are not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from driver import Check, at_most, on_ranks
from settings import Agenda, rank_device, seconds_left, sizes_of


def run(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(calibrate_all, args, 1, backend=None, limit_s=seconds_left(args))
    return found


_ERROR = "relative_rms_error"


def calibration_path(folder: Path, model: str, kernel: str) -> Path:
    return folder / f"calibration-{model}-{kernel.replace(' ', '-')}.json"


def calibrate_all(args: argparse.Namespace) -> dict[str, Any]:
    """The fits and their checks; for each kernel that is not there ("absent"), the reason."""
    from knapformer.adapters.named import load_config
    from knapformer.models.parallel import DTYPES
    from knapformer.tools import cli
    from knapformer.tools.calibrate.fit import MAX_ERROR
    from knapformer.tools.measure.device import default_dtype

    device = rank_device(args)
    dtype = DTYPES[default_dtype(device)]
    fits, agenda, checks = [], Agenda(args), list[Check]()
    kernels = kernels_of_packages()
    reasons = {
        (model, name): why_not(kernel, device, dtype, load_config(model).head_dim)
        for name, kernel in kernels.items()
        for model in sizes_of(args).calibrated
    }
    absent = [{"model": model, "kernel": name, "reason": reason} for (model, name), reason in reasons.items() if reason]
    if args.kept.get("absent"):  # named before
        absent = []
    # Kernel by kernel, so that each model has its first one before any second: other parts need that calibration.
    for name in kernels:
        for model in sizes_of(args).calibrated:
            if reasons[model, name] is not None or not agenda.begins(f"{model}, {name}"):
                continue
            path = calibration_path(args.out, model, name)
            options = ["--model", model, "--device", args.device, "--json", str(path), *sizes_of(args).calibration]
            try:
                with kernels[name]():
                    fitted = cli.main(["calibrate", *options]) == 0
            except Exception as error:  # out of memory, or a kernel that refuses what the trial did not have
                print(f"{model}, {name}: {error}")
                fitted = False
            content = json.loads(path.read_text()) if fitted else {}
            # A failed fit (the command has printed why, such as a noisy machine) counts as an error of 100 %.
            error = at_most(content.get(_ERROR, 1.0), MAX_ERROR)
            checks.append({"name": f"{model}, {name}: error of the fit", **error})
            if fitted:
                kept = ("gamma", "seconds_per_flop", _ERROR, "warnings")
                fits.append({"model": model, "kernel": name, **{field: content[field] for field in kept}})
            agenda.keep({"fits": fits, "absent": absent, "checks": checks})
    return {"fits": fits, "absent": absent, "checks": checks, **agenda.result()}


Kernel = Callable[[], contextlib.AbstractContextManager[object]]  # inside, the models' attention uses it alone


def kernels_of_packages() -> dict[str, Kernel]:
    """Kernels by name, in the order in which models would choose them: torch's variable-length attention, all sequences
    in one launch; the same by other implementations that torch knows; torch's attention, one sequence at a time; and
    the other backends that diffusers' models may be set to."""
    from torch.nn import attention

    kernels: dict[str, Kernel] = {"varlen": _varlen}
    known = attention.list_flash_attention_impls() if hasattr(attention, "list_flash_attention_impls") else []
    kernels |= {f"varlen {name}": functools.partial(_varlen, name) for name in known}
    by_sequence = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
    kernels |= {name: functools.partial(_by_sequence, backend) for name, backend in by_sequence.items()}
    return kernels | {f"diffusers {name}": functools.partial(_by_diffusers, name) for name in diffusers_backends()}


def diffusers_backends() -> list[str]:
    """All but torch's own (native), those that diffusers downloads (hub), the quantised ones (sage), which have no
    backward pass, and flex, which computes all scores where it is not compiled."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    words = ("native", "hub", "sage", "flex")
    return [backend.value for backend in AttentionBackendName if not any(word in backend.value for word in words)]


def why_not(kernel: Kernel, device: Any, dtype: Any, head_dim: int) -> str | None:
    """Why the kernel does not run on the device; None where it does, forward and backward."""
    import torch

    q, k, v = torch.ones(3, 64, 2, head_dim, device=device, dtype=dtype, requires_grad=True).unbind(0)
    try:
        with kernel() as attend:
            o = attend(q, k, v, [40, 24])  # type: ignore[operator]
            o.sum().backward()
            if o.shape != q.shape or not o.isfinite().all():
                return f"gives {tuple(o.shape)}, or numbers that are not finite"
    except Exception as error:  # of any package
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


Attend = Callable[..., Any]


@contextlib.contextmanager
def _varlen(implementation: str | None = None) -> Iterator[Attend]:
    from knapformer.models import attention
    from torch.nn import attention as of_torch

    def attend(q: Any, k: Any, v: Any, seq_lens: list[int]) -> Any:
        if not attention._may_have_kernel(q.device):
            raise RuntimeError("torch has no variable-length attention on a CPU")
        return attention._Pairing(seq_lens, seq_lens).one_kernel(q, k, v, causal=False)

    attention._kernel_runs.cache_clear()  # models try it anew
    if implementation is not None:
        of_torch.activate_flash_attention_impl(implementation)
    try:
        yield attend
    finally:
        attention._kernel_runs.cache_clear()
        if implementation is not None:
            of_torch.restore_flash_attention_impl()


@contextlib.contextmanager
def _by_sequence(backend: str) -> Iterator[Attend]:
    """Applies to all threads."""
    from knapformer.models import attention
    from torch.nn.attention import SDPBackend, sdpa_kernel

    alone = mock.patch.object(attention, "_may_have_kernel", lambda device: False)
    with alone, sdpa_kernel(getattr(SDPBackend, backend)):
        yield attention.varlen_attention


@contextlib.contextmanager
def _by_diffusers(backend: str) -> Iterator[Attend]:
    from diffusers.models.attention_dispatch import attention_backend
    from knapformer.adapters.backend import attend_by
    from torch import nn

    any_module = nn.Module()
    any_module.processor = object()  # as in diffusers' modules: computes by the active backend
    with attention_backend(backend):
        attend = attend_by(any_module)
        if attend is None:
            raise RuntimeError("diffusers takes torch's own attention in its place")
        yield attend
