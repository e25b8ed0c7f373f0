"""Finds the packages; setup.cfg has everything else about the distribution."""

from setuptools import find_packages, setup

# The repository's root is the package `phalanx` (ARCHITECTURE.md, "The house"). setup.cfg's `find:` cannot say that: it
# names the folders of the root as packages of their own.
found = find_packages(exclude=("tests", "tests.*", "benchmarks", "benchmarks.*"))
setup(
    package_dir={"phalanx": "."},
    packages=["phalanx", *(f"phalanx.{name}" for name in found)],
    script_name="setup.py",  # which is no module of the package: setuptools leaves out the file of this name
)
