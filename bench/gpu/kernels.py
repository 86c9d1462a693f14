"""`knapformer calibrate` of each model with each attention kernel that the device has."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from driver import Check, at_most, on_ranks
from settings import limit_of, rank_device, sizes_of

LIMIT_S = 150.0


def run(args: argparse.Namespace) -> dict[str, Any]:
    from knapformer.tools.calibrate.fit import MAX_ERROR

    fits = on_ranks(calibrate_all, args, 1, backend=None, limit_s=limit_of(args, LIMIT_S))
    checks: list[Check] = [
        # What could not be fitted (it has said why, such as a noisy machine) is off by all of it.
        {"name": f"{fit['model']}, {fit['kernel']}: error of the fit", **at_most(fit.get(_ERROR, 1.0), MAX_ERROR)}
        for fit in fits
    ]
    return {"fits": [fit for fit in fits if _ERROR in fit], "checks": checks}


_ERROR = "relative_rms_error"


def calibration_path(folder: Path, model: str, kernel: str) -> Path:
    return folder / f"calibration-{model}-{kernel}.json"


def calibrate_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from knapformer.adapters.named import load_config
    from knapformer.models.parallel import DTYPES
    from knapformer.tools import cli
    from knapformer.tools.measure.device import default_dtype

    device = rank_device(args)
    dtype = DTYPES[default_dtype(device)]
    fits = []
    for model in sizes_of(args).calibrated:
        for kernel in kernels_on(device, dtype, load_config(model).head_dim):
            path = calibration_path(args.out, model, kernel)
            options = ["--model", model, "--device", args.device, "--json", str(path), *sizes_of(args).calibration]
            try:
                with _only(kernel):
                    fitted = cli.main(["calibrate", *options]) == 0
            except torch.OutOfMemoryError as error:
                print(f"{model}, {kernel}: {error}")
                fitted = False
            content = json.loads(path.read_text()) if fitted else {}
            kept = ("gamma", "seconds_per_flop", _ERROR, "warnings")
            of = {field: content[field] for field in kept if field in content}
            fits.append({"model": model, "kernel": kernel, **of})
    return fits


_VARLEN = "varlen"  # torch's variable-length attention: all sequences in one launch
_SDPA = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}  # of SDPBackend


def kernels_on(device: Any, dtype: Any, head_dim: int) -> list[str]:
    """Those that run there, forward and backward; the first is what the models choose by themselves."""
    import torch
    from knapformer.models.attention import varlen_attention

    def runs(kernel: str) -> bool:
        q, k, v = torch.ones(3, 64, 2, head_dim, device=device, dtype=dtype, requires_grad=True).unbind(0)
        try:
            with _only(kernel):
                varlen_attention(q, k, v, [40, 24]).sum().backward()
        except RuntimeError:
            return False
        return True

    return [*([_VARLEN] if has_varlen(device, dtype, head_dim) else []), *(name for name in _SDPA if runs(name))]


def has_varlen(device: Any, dtype: Any, head_dim: int) -> bool:
    from knapformer.models import attention

    return attention._may_have_kernel(device) and attention._kernel_runs(
        device, dtype, head_dim, grouped=False, causal=False
    )


@contextlib.contextmanager
def _only(kernel: str) -> Iterator[None]:
    """Attention of the models by this kernel alone, in all threads."""
    from knapformer.models import attention
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if kernel == _VARLEN:
        yield
        return
    by_sequence = mock.patch.object(attention, "_may_have_kernel", lambda device: False)
    with by_sequence, sdpa_kernel(getattr(SDPBackend, _SDPA[kernel])):
        yield
