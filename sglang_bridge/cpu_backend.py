"""What SGLang 0.5.23 asks of CUDA where it has no CPU branch, answered for a plain CPU.

Invariants
- Applied once per process, before ``sglang`` is imported (``install`` raises otherwise), and only without an
  accelerator; ``serve`` is the only caller.
- Every adjustment is named in ``ADJUSTMENTS`` with its upstream reason. None of them computes anything: they
  let modules import that name GPU kernels, and raise if such a kernel is ever called.
- A version of SGLang they were not written for is refused, rather than half adjusted.

Only names are stubbed. On a CPU SGLang then takes its own native PyTorch paths, mixture of experts included.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

SUPPORTED_SGLANG = ("0.5.23",)

# Server flags without which SGLang 0.5.23 picks CUDA or fp16 defaults, or burns a core while idle.
SERVER_FLAGS: dict[str, str | None] = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--disable-overlap-schedule": None,
    "--sleep-on-idle": None,
}


class CpuBackendError(RuntimeError):
    """The adjustments do not fit the installed SGLang, or came too late."""


def _missing_kernel(module: str, name: str) -> Callable[..., NoReturn]:
    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{module}.{name} is a GPU kernel and was called on a CPU. SGLang took a GPU path: "
            "check --attention-backend torch_native, --sampling-backend pytorch and the model's quantisation."
        )

    missing.__name__ = missing.__qualname__ = name
    return missing


class _StubMeta(type):
    """Unknown attributes of a stub class exist (``InterpolationMode.BICUBIC`` as a default argument)."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StubClass(metaclass=_StubMeta):
    """Base for classes of a stubbed package that other modules subclass or name in annotations."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        super().__init__()

    def __init_subclass__(cls, **_kwargs: object) -> None:
        super().__init_subclass__()

    def __class_getitem__(cls, _item: object) -> type:
        return cls


class _KernelStub(types.ModuleType):
    """A module whose functions raise when they are called (``sgl_kernel``)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _missing_kernel(self.__name__, name)
        setattr(self, name, value)
        return value


class _LanguageStub(types.ModuleType):
    """A module of a kernel language (``triton``): decorators pass through, so kernels can be *defined*.

    Capitalised names are classes, other names are sub-stubs. Calling a stub as a decorator returns the
    decorated function; launching a kernel (``kernel[grid](...)``) fails, because a function has no grid.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value: Any
        if name[:1].isupper():
            value = _StubMeta(name, (_StubClass,), {"__module__": self.__name__})
        else:
            value = sys.modules.get(full) or _language_module(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]
        return lambda function: function


def _language_module(full: str) -> _LanguageStub:
    module = _LanguageStub(full)
    module.__spec__ = importlib.machinery.ModuleSpec(full, _StubLoader(), is_package=True)
    module.__path__ = []
    sys.modules[full] = module
    return module


class _StubLoader(importlib.abc.Loader):
    """Makes a stub in place of a package that is not installed."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _KernelStub(spec.name) if spec.name == "sgl_kernel" else _LanguageStub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "triton":
            module.__version__ = "3.9.0"  # type: ignore[attr-defined]  # read at import by torch and SGLang


class _StubFinder(importlib.abc.MetaPathFinder):
    """Finds a package as a stub; with ``below``, every module under it too (else those stay missing)."""

    def __init__(self, package: str, *, below: bool) -> None:
        self.package, self.below = package, below

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = self.below and fullname.startswith(f"{self.package}.")
        if fullname != self.package and not inside:
            return None
        return importlib.machinery.ModuleSpec(fullname, _StubLoader(), is_package=True)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function once, right before or after the named module is first executed."""

    def __init__(self, name: str, *, before: Callable[[], None] | None = None,
                 after: Callable[[types.ModuleType], None] | None = None) -> None:
        self.name, self.before, self.after = name, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        if self.before is not None:
            self.before()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None and self.after is not None:
            execute, after = spec.loader.exec_module, self.after

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                after(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _stub_if_absent(package: str, *, below: bool) -> bool:
    absent = importlib.util.find_spec(package) is None
    if absent:
        sys.meta_path.insert(0, _StubFinder(package, below=below))
    return absent


def _stub_sgl_kernel() -> None:
    # Its sub-modules stay missing: SGLang guards those imports and has a path without them.
    _stub_if_absent("sgl_kernel", below=False)


def _stub_triton() -> None:
    _stub_if_absent("triton", below=True)


def _select_cpu_engine() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def _torchvision() -> None:
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # cached: transformers must remember the truth, not find the stub
    if _stub_if_absent("torchvision", below=True):
        return

    def define() -> None:
        import torch

        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", signature)

    sys.meta_path.insert(0, _AfterImport("torchvision", before=define))


def _unpin_host_buffers() -> None:
    def patch(module: types.ModuleType) -> None:
        def unpinned(dims: Any, dtype: Any, device: Any, *_args: object, **_kwargs: object) -> Any:
            import torch

            return torch.empty(dims, dtype=dtype, device=device)

        table = getattr(module, "ALLOC_MEMORY_FUNCS", None)
        if not isinstance(table, dict):
            raise CpuBackendError(f"{module.__name__}.ALLOC_MEMORY_FUNCS is {table!r}, expected a table by device")
        table["cpu"] = unpinned

    sys.meta_path.insert(0, _AfterImport("sglang.srt.mem_cache.pool_host.common", after=patch))


def _skip_cuda_synchronise() -> None:
    import torch

    torch.cuda.synchronize = lambda *_args, **_kwargs: None  # type: ignore[assignment]


ADJUSTMENTS: dict[str, tuple[str, Callable[[], None]]] = {
    "cpu-engine": (
        "SGLang without CUDA, XPU or AMX takes itself for a vLLM build unless SGLANG_USE_CPU_ENGINE is set",
        _select_cpu_engine,
    ),
    "sgl-kernel-stub": (
        "layers import names of sgl_kernel at module level, also where only their PyTorch paths run",
        _stub_sgl_kernel,
    ),
    "triton-stub": (
        "about a hundred modules define Triton kernels at import; none is launched on a CPU, and the package is 1 GB",
        _stub_triton,
    ),
    "torchvision": (
        "model configurations import torchvision; its published build does not load beside a CPU torch, because it "
        "registers fakes of operators that only its CUDA library defines",
        _torchvision,
    ),
    "unpinned-host-buffers": (
        "the routed-experts buffer is allocated in pinned memory without asking for the device",
        _unpin_host_buffers,
    ),
    "no-cuda-synchronise": (
        "weight updates call torch.cuda.synchronize without asking for the device",
        _skip_cuda_synchronise,
    ),
}


def install() -> list[str]:
    """Apply every adjustment and return their names.

    Raises:
        CpuBackendError: SGLang is already imported, not installed, or of another version.
    """
    if "sglang" in sys.modules:
        raise CpuBackendError("the CPU adjustments must be installed before sglang is imported; start the engine "
                              "with `python -m sglang_bridge.serve`")
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise CpuBackendError(f"sglang is not installed; install sglang=={SUPPORTED_SGLANG[-1]}") from error
    if version not in SUPPORTED_SGLANG:
        raise CpuBackendError(f"the CPU adjustments were written for sglang {', '.join(SUPPORTED_SGLANG)}, found "
                              f"{version}; install that version, or run on a GPU")
    for _reason, apply in ADJUSTMENTS.values():
        apply()
    return list(ADJUSTMENTS)


def add_server_flags(arguments: list[str]) -> list[str]:
    """``arguments`` plus the CPU server flags the caller did not give."""
    given = {argument.split("=", 1)[0] for argument in arguments}
    flags = [(flag, value) for flag, value in SERVER_FLAGS.items() if flag not in given]
    return arguments + [part for flag, value in flags for part in (flag, value) if part is not None]
