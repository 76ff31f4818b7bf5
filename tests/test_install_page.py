"""``docs/how-to/install.md``: its commands run, and its tables are those of the project's files."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMMANDS = re.findall(
    r"<!-- run elsewhere=tests/test_install_page\.py -->\n```sh\n(.*?)```", TEXT, re.DOTALL
)


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_table_of_extras_names_each_extra_and_what_it_installs() -> None:
    extras = dict(SETTINGS["project"]["optional-dependencies"])
    rows = rows_under("Install extras")
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[0])) == sorted(extras)
    for names, installs, _ in rows:
        if re.fullmatch(r"`\w+`", names) and "others" not in installs and "Sphinx" not in installs:
            packages = {re.split(r"[<>=\[]", text)[0] for text in extras[names.strip("`")]}
            assert {each.lower() for each in installs.split(", ")} == packages


def test_table_of_packages_names_each_dependency() -> None:
    packages = {re.split(r"[<>=;]", text)[0] for text in SETTINGS["project"]["dependencies"]}
    rows = rows_under("What pip installs")
    assert {name for row in rows for name in row[0].split(", ")} == packages


def test_wheels_are_built_for_the_supported_versions() -> None:
    built = SETTINGS["tool"]["cibuildwheel"]["build"]
    classifiers = SETTINGS["project"]["classifiers"]
    versions = [text.split(":: ")[-1] for text in classifiers if ":: Python :: 3." in text]
    assert built == [f"cp{version.replace('.', '')}-*" for version in versions]
    assert f"Python {versions[0]} or newer" in TEXT
    assert f"CPython {versions[0]} to {versions[-1]}" in TEXT
    stable = SETTINGS["tool"]["scikit-build"]["wheel"]["py-api"]
    assert f"`{stable}-abi3`" in TEXT


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "wingbeat's extension needs a C++20 compiler, and none was found: apt install g++"),
        (
            [
                *("-DCMAKE_CXX_COMPILER={c++}", "-DCMAKE_CXX_COMPILER_ID=GNU"),
                *("-DCMAKE_CXX_COMPILER_VERSION=10.2.0", "-DCMAKE_CXX_COMPILER_FORCED=ON"),
            ],
            "wingbeat's extension needs GCC 11 or Clang 14 or newer; {c++} is GNU 10.2.0",
        ),
        (
            ["-DCMAKE_CXX_COMPILER={c++}", "-DPython_INCLUDE_DIR={folder}"],
            "wingbeat's extension needs Python 3.10 or newer with its headers, and {python} has",
        ),
    ],
)
def test_build_without_compiler_or_headers_fails_with_one_line(
    words: list[str], error: str, tmp_path: Path
) -> None:
    compiler, make = (
        subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("c++", "make")
    )
    names = {"c++": compiler, "folder": str(tmp_path), "python": sys.executable}
    cmake = [Path(sys.executable).with_name("cmake"), "-S", ROOT / "native", "-B", tmp_path / "b"]
    cmake += [f"-DCMAKE_MAKE_PROGRAM={make}", f"-DPython_EXECUTABLE={sys.executable}"]
    for word in words:
        cmake.append(re.sub(r"\{([\w+]+)\}", lambda found: names[found[1]], word))
    (tmp_path / "bin").mkdir()
    for tool in ("as", "ld"):  # a compiler that is given needs these; by themselves they are none
        (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    env = {"PATH": str(tmp_path / "bin")}
    done = subprocess.run(cmake, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    [line] = [each.strip() for each in done.stderr.splitlines() if "wingbeat's" in each]
    assert line.startswith(re.sub(r"\{([\w+]+)\}", lambda found: names[found[1]], error))
    assert line.endswith(("install a wheel", "set CXX to another one"))


def test_page_lists_the_errors_of_the_build() -> None:
    text = (ROOT / "native/CMakeLists.txt").read_text(encoding="utf-8")
    joined = re.sub(r'"\s+"', "", text)
    errors = re.findall(r"FATAL_ERROR \" (wingbeat's .*?)[,;]", joined)
    assert len(errors) == 3
    messages = " ".join(row[0] for row in rows_under("If the installation fails"))
    for error in errors:
        assert error.split(",")[0] in messages


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_of_page_install_wingbeat(tmp_path: Path) -> None:
    """In an environment with the packages of this one, which pip therefore does not download."""
    tool = wheel_test()
    tool.copy_checkout(tmp_path / "wingbeat")
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    packages = tool.site_packages(home)
    beside = tmp_path / "beside"
    beside.mkdir()
    for each in Path(pytest.__file__).parents[1].iterdir():
        if "wingbeat" not in each.name and each.suffix != ".pth":
            (beside / each.name).symlink_to(each)
    (packages / "zz-beside.pth").write_text(f"{beside}\n", encoding="utf-8")
    env = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env["PYTHONPATH"] = ""
    installed = "import wingbeat._native as n; print(n.__file__)"
    seen = []
    for command in COMMANDS:
        folder = tmp_path if command.startswith("cd ") else tmp_path / "wingbeat"
        words = ["bash", "-eu", "-c", command]
        subprocess.run(words, cwd=folder, env=env, check=True, timeout=1200)
        shown = subprocess.run(
            [home / "bin/python", "-c", installed], cwd=home, env=env, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        assert str(tmp_path) in shown.stdout
        seen.append(command.split()[-1])
    assert seen[:2] == [".", "https://download.pytorch.org/whl/cpu"]
    assert seen[2:] == [".", "dist/wingbeat-*.whl", "'.[dev,bench]'"]


def wheel_test() -> ModuleType:
    """The script of ``make wheel-test``."""
    spec = importlib.util.spec_from_file_location("wheel_test", ROOT / "tools/wheel_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
