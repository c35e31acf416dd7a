"""Runs the notebooks from top to bottom, in this interpreter, and saves them with their outputs.

    python notebooks/execute.py                          all of them, in place (`make notebooks`)
    python notebooks/execute.py tour.ipynb               one of them
    python notebooks/execute.py --short --into FOLDER    quickly, as CI does; what is here stays as it is

It ends with code 1 if a cell fails. What is saved tells nothing of the machine but what a cell prints.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).parent
BESIDE = ("lab.py", "pictures.py")
"""What the notebooks use of this folder: outputs are of these versions, too."""
CELL_PATIENCE_S = 600


class ThisInterpreter(KernelSpecManager):
    """A kernel called python3 may be installed that is another Python: it is not asked for."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """This Python, whatever the name."""
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def sources_digest(notebook: Any, folder: Path = HERE) -> str:
    """What the outputs depend on: the code of all cells, and of the modules beside the notebook."""
    digest = hashlib.blake2b(digest_size=8)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            digest.update(cell.source.encode() + b"\0")
    for name in BESIDE:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def execute(path: Path, *, short: bool) -> Any:
    """The notebook with fresh outputs. Raises if a cell does, after the kernel was ended."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        environment = {
            **os.environ,
            "IPYTHONDIR": folder,
            "JUPYTER_RUNTIME_DIR": folder,
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "RAY_PCCL_NOTEBOOKS": "short" if short else "",
        }
        kernel = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=ThisInterpreter(),
            connection_file=str(Path(folder) / "kernel.json"),
            shutdown_wait_time=30.0,
            transport="ipc",  # no port that others could connect to
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_PATIENCE_S,
            resources={"metadata": {"path": str(HERE)}},
            coalesce_streams=True,
            record_timing=False,
        )
        client.execute(env=environment, cleanup_kc=True)  # the kernel is ours: it ends here, and Ray with it
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "ray_pccl": {"sources": sources_digest(notebook), "short": short},
        }
    )
    return notebook


def main() -> int:
    """Returns 0 if every cell of every notebook went well."""
    parser = argparse.ArgumentParser(description="Runs the notebooks and saves them with their outputs.")
    parser.add_argument("names", nargs="*", help="such as tour.ipynb (default: all)")
    parser.add_argument("--short", action="store_true", help="the quick form, for CI; not for what is committed")
    parser.add_argument("--into", type=Path, default=HERE, help="where to save (default: in place)")
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.names or sorted(path.name for path in HERE.glob("*.ipynb")):
        began = time.monotonic()
        try:
            notebook = execute(HERE / name, short=arguments.short)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed += 1
            continue
        nbformat.write(notebook, arguments.into / name)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
