"""Packaging of megatron-async and sglang_bridge.

`pip install -e .` installs what configuration, rollout, bank and observation need. The engines come by extras: `gpu`
for a cluster, `cpu` (plus requirements/cpu-nodeps.txt, see recipes/setup.sh) for a machine without one.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def pins(name: str) -> list[str]:
    """The requirement lines of a file under requirements/."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def version() -> str:
    """`__version__` of the package, without importing it."""
    text = (ROOT / "megatron_async" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    assert found is not None, "megatron_async/__init__.py defines no __version__"
    return found.group(1)


setup(
    name="megatron-async",
    version=version(),
    description="Asynchronous RL for LLM agents: Megatron-core trains, SGLang samples, no old logit is lost",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(
        include=["megatron_async", "megatron_async.*", "sglang_bridge", "sglang_bridge.*"]
    ),
    include_package_data=True,
    install_requires=[
        "aiohttp>=3.10",
        "matplotlib>=3.9",
        "msgspec>=0.18",
        "numba>=0.60",
        "numpy>=1.26",
        "orjson>=3.9",
        "psutil>=5.9",
        "pyyaml>=6.0",
        "rich>=13.0",
        "safetensors>=0.4",
        "sqlalchemy>=2.0",
        "tensorboard>=2.15",
        "tokenizers>=0.20",
        "transformers>=4.56",
        "xxhash>=3.4",
        "zstandard>=0.22",
    ],
    extras_require={
        "cpu": pins("cpu.txt"),
        "gpu": ["megatron-core==0.16.1", "sglang==0.5.23", "psycopg[binary]>=3.2"],
        # Compiled against the torch that is there: install it after `gpu`, with --no-build-isolation.
        "transformer-engine": ["transformer-engine[core_cu13,pytorch]>=2.0"],
        "dev": pins("dev.txt"),
        # bfcl-eval's own pins contradict the rest: recipes/setup.sh installs it without them.
        "tau2": [pin for pin in pins("tau2.txt") if not pin.startswith("bfcl-eval==")],
    },
    entry_points={"console_scripts": ["megatron-async = megatron_async.cli:main"]},
)
