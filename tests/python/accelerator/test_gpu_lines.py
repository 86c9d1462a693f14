"""What only a GPU runs is in the table of docs/gpu.md, with its reason."""

from __future__ import annotations

import gpu_lines


def test_every_line_that_names_cuda_has_a_reason() -> None:
    """A new one is added to the table of docs/gpu.md ("What only a GPU runs"), or needs no CUDA: torch.accelerator,
    torch.Event and DeviceGuard serve every device."""
    listed = gpu_lines.listed_files()
    assert {file: count for file, count in listed.items() if count > 0} == gpu_lines.files_that_name_cuda()
    assert all((gpu_lines.ROOT / file).exists() for file in listed)


def test_what_names_cuda() -> None:
    python = 'x = torch.cuda.Event()\n"""CUDA, in words"""\ny = "cpu:gloo,cuda:nccl"  # cuda\nz = f"for CUDA {x}"\n'
    assert gpu_lines._lines_of_python(python) == {1, 3}
    assert gpu_lines._lines_of_cpp("a.is_cuda();  // CUDA\n// CUDA\nnvrtcCompile();\n") == {1, 3}
