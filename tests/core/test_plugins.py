"""Plugins as a machine may really have them: broken, clashing, too new, missing, and a third party's stage at work."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from spill.plugins import Detection, EngineSpec, Registry, StageSpec, StoreSpec, detect, discover, record_fault
from spill.testing.plugins import install_plugin
from tests.conftest import Spill, write_folder
from tests.core.builds import everything, files, head, one_line, rewrite

ENGINE = """
from spill.plugins import Detection, EngineSpec, hookimpl

@hookimpl
def spill_engines():
    yield EngineSpec(name="{name}", target="{target}", contract={contract}, summary="for tests",
                     detect=lambda: {detection})
"""
STAGE = """
from spill.plugins import StageSpec, hookimpl

@hookimpl
def spill_stages():
    yield StageSpec(name="{name}", target="{target}", contract={contract}, summary="losses of the training rows")
"""
NUMPY = "spill.testing.numpy_engine:open_engine"

Install = Callable[..., Path]
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs most of a tiny build's time. Unlike `quick`, this looks for plugins in every command."""
    monkeypatch.setattr("spill.stores.local._sync", lambda handle: None)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a plugin of this code into a folder on the path: `install("spill-mine", code, version="2.0")`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules: list[str] = []

    def write(distribution: str, code: str, version: str = "1.0", module: str = "") -> Path:
        name = module or f"plugin_for_test_{next(_numbers)}"
        modules.append(name)
        (site / f"{name}.py").write_text(code, encoding="utf-8")
        install_plugin(site, distribution=distribution, module=name, version=version)
        return site

    yield write
    for name in modules:
        sys.modules.pop(name, None)


def engine(name: str, rank: int = 0, available: bool = True, reason: str = "for tests", **change: object) -> str:
    detection = f"Detection(available={available}, rank={rank}, reason={reason!r})"
    values = {"name": name, "target": NUMPY, "contract": 1, "detection": detection, **change}
    return ENGINE.format(**values)


def stage(name: str = "audit", target: str = "audit_stage:open_audit", contract: int = 1) -> str:
    return STAGE.format(name=name, target=target, contract=contract)


def only(monkeypatch: pytest.MonkeyPatch, *distributions: str) -> None:
    """Make this process believe that nothing else is installed."""
    found = [d for d in metadata.distributions() if d.name in distributions]
    monkeypatch.setattr("spill.plugins.metadata.distributions", lambda: iter(found))


# ---- a plugin that is broken

HALF = engine("half") + "\n@hookimpl\ndef spill_stages():\n    raise RuntimeError('second half')\n"
BROKEN = {
    "import error": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "syntax error": ("def f(:\n", "SyntaxError: invalid syntax"),
    "system exit": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "no Exception at all": ("class Panic(BaseException): pass\nraise Panic('rust')", "Panic: rust"),
    "raises several lines": ("raise ValueError('one\\n\\ttwo\\r\\nthree')", "ValueError: one two three"),
    "half registered": (HALF, "RuntimeError: second half"),
    "yields a text": (engine("x") + "    yield 'nonsense'\n", "a str was yielded, not a record EngineSpec"),
    "yields another kind": (
        stage().replace("def spill_stages", "def spill_stores"),
        "a StageSpec was yielded, not a record StoreSpec",
    ),
    "returns no list": (
        "from spill.plugins import hookimpl\n@hookimpl\ndef spill_engines():\n    return 3\n",
        "TypeError: 'int' object is not iterable",
    ),
    "a name that cannot be typed": (engine("my engine"), "'my engine' is not a name of letters, digits and"),
    "a contract that is no number": (engine("x", contract="'1'"), "has contract '1', not a whole number"),
    "a hook that is misspelt": (
        engine("x").replace("spill_engines", "spill_engine"),
        "unknown hook 'spill_engine'",
    ),
    "a hook with an argument": (engine("x").replace("engines()", "engines(config)"), "PluginValidationError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_named_in_one_line_and_breaks_nothing(spill: Spill, install: Install, kind: str) -> None:
    code, cause = BROKEN[kind]
    install("spill-broken", code, version="0.7")
    done = spill("doctor", "--names")
    assert done.code == 0
    assert "numpy" in done.out.split()
    assert not {"half", "x"} & set(done.out.split()), "a plugin that broke half-way brings nothing"
    (line,) = done.err.splitlines()
    assert line.startswith("spill: plugin 'spill-broken' of spill-broken 0.7 is broken and was left out: ")
    assert cause in line
    shown = spill("plugins")
    assert (shown.code, shown.err) == (0, "")
    assert "spill-broken (spill-broken 0.7)\n  BROKEN: " in shown.out
    assert "    Traceback (most recent call last):" in shown.out, "the whole cause is shown"
    assert "  engine numpy        llama in float32 on numpy, for tests" in shown.out


def test_a_build_goes_on_beside_broken_plugins(spill: Spill, install: Install, folder: Path) -> None:
    install("spill-exits", "raise SystemExit(9)")
    install("spill-missing", "import no_such_library")
    done = spill("build", folder)
    assert done.code == 0, done.err
    assert len(done.err.splitlines()) == 2


def test_help_and_version_do_not_even_look_at_plugins(spill: Spill, install: Install) -> None:
    install("spill-loud", "raise AssertionError('imported')")
    for arguments in (["--help"], ["--version"], ["build", "--help"], ["plugins", "--help"]):
        assert (spill(*arguments).code, spill(*arguments).err) == (0, "")


@pytest.mark.parametrize(
    ("entry_points", "with_metadata"),
    [
        ("[spill]\nmine = plugin_without_metadata\n", False),
        ("[spill]\nno equals sign\n", True),
        ("[spill]\nmine = !!\n", True),
    ],
)
def test_damaged_metadata_breaks_nothing(
    spill: Spill, install: Install, entry_points: str, with_metadata: bool
) -> None:
    site = install("spill-good", engine("good"))
    info = site / "damaged-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(entry_points)
    if with_metadata:
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    done = spill("doctor", "--names")
    assert done.code == 0, done.err
    assert {"good", "numpy"} <= set(done.out.split())
    (line,) = done.err.splitlines()
    assert "damaged" in line
    assert "is broken and was left out" in line


@pytest.mark.parametrize("entry_points", [b"[console_scripts]\nno equals sign\n", b"[console_scripts]\na = \xff\n"])
def test_damaged_metadata_of_a_stranger_is_nobodys_business(
    spill: Spill, install: Install, entry_points: bytes
) -> None:
    site = install("spill-good", engine("good"))
    info = site / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(entry_points)
    done = spill("doctor", "--names")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("kind", "spec", "fault"),
    [
        ("engine", None, "a NoneType was yielded"),
        ("store", StageSpec(name="a", target="a:b", contract=1, summary=""), "a StageSpec was yielded"),
        ("store", StoreSpec(name="", target="a:b", contract=1, summary=""), "is not a name"),
        ("store", StoreSpec(name="a,b", target="a:b", contract=1, summary=""), "is not a name"),
        ("store", StoreSpec(name=3, target="a:b", contract=1, summary=""), "3 is not a name"),  # type: ignore[arg-type]
        ("store", StoreSpec(name="a", target="a.b", contract=1, summary=""), "not package.module:callable"),
        ("store", StoreSpec(name="a", target="a:b()", contract=1, summary=""), "not package.module:callable"),
        ("store", StoreSpec(name="a", target="a:b", contract=True, summary=""), "has contract True"),
        ("store", StoreSpec(name="a", target="a:b", contract=1, summary="x\x1b[0m"), "not one line of text"),
        (
            "engine",
            EngineSpec(name="a", target="a:b", contract=1, summary="", detect=3),  # type: ignore[arg-type]
            "a detect that cannot be called",
        ),
    ],
)
def test_a_malformed_record_is_told(kind: str, spec: object, fault: str) -> None:
    assert fault in record_fault(kind, spec)


def test_well_formed_records_are_fine() -> None:
    for plugin in discover().plugins:
        assert [record_fault(kind, spec) for kind, spec in plugin.specs] == [""] * len(plugin.specs)


# ---- clashes and contracts


def test_two_plugins_of_one_name_are_listed_with_their_versions(spill: Spill, install: Install, folder: Path) -> None:
    install("spill-one", engine("twin", rank=5000), version="1.1")
    install("spill-two", engine("twin", rank=6000, target="other:open"), version="2.2")
    for arguments in (["--engine", "twin"], ["--state", "elsewhere", "--engine", "twin"]):
        done = spill("build", folder, *arguments)
        assert done.code == 1
        assert done.error == (
            f"spill: engine 'twin' is claimed by 2 plugins: spill-one 1.1 ({NUMPY}), spill-two 2.2 (other:open); "
            "uninstall all but one of them"
        )
    assert spill("build", folder, "--engine", "numpy", "--stop-after", "eval:base:1").code == 0
    assert "CLASH: engine 'twin' of spill-one 1.1, spill-two 2.2" in spill("plugins").out
    assert "twin" not in spill("doctor", "--names").out


def test_a_clash_is_an_error_also_where_nobody_asked_for_the_name(spill: Spill, install: Install, folder: Path) -> None:
    install("spill-one", engine("twin"))
    install("spill-two", engine("twin"))
    done = spill("build", no_engine_named(folder))
    assert done.code == 1
    assert "engine 'twin' is claimed by 2 plugins: spill-one 1.0" in done.error


def test_one_module_that_two_distributions_name_is_a_clash_too(spill: Spill, install: Install, folder: Path) -> None:
    site = install("spill-old-name", engine("twin"), module="shared_plugin")
    install_plugin(site, distribution="spill-new-name", module="shared_plugin")
    done = spill("build", folder, "--engine", "twin")
    assert "claimed by 2 plugins: spill-new-name 1.0" in done.error
    assert "spill-old-name 1.0" in done.error


def test_a_stage_or_a_store_of_ours_claimed_again_is_a_clash(spill: Spill, install: Install, folder: Path) -> None:
    install("spill-tune", stage("tune"))
    done = spill("build", folder)
    assert done.code == 1
    assert "stage 'tune' is claimed by 2 plugins: spill-core " in done.error
    assert ", spill-tune 1.0 (audit_stage:open_audit); uninstall all but one of them" in done.error


@pytest.mark.parametrize(("contract", "upgrade"), [(99, "spill-core"), (2, "spill-core"), (0, "spill-odd")])
def test_another_contract_says_which_side_to_upgrade(
    spill: Spill, install: Install, folder: Path, contract: int, upgrade: str
) -> None:
    install("spill-odd", engine("odd", rank=9000, contract=contract), version="3.1")
    said = f"engine 'odd' of spill-odd 3.1 speaks contract {contract}, this spill-core speaks 1: upgrade {upgrade}"
    done = spill("build", folder, "--engine", "odd")
    assert done.code == 1
    assert done.err.splitlines() == [f"spill: {said}"] * 2, "once as the warning, once as the error"
    done = spill("build", folder, "--stop-after", "eval:base:1")
    assert done.code == 0, "another engine works"
    assert done.err == f"spill: {said}\n"
    assert f"NOT USABLE: {said}" in spill("plugins").out
    assert "odd" not in spill("doctor", "--names").out


def test_a_stage_of_another_contract_is_refused(spill: Spill, install: Install, folder: Path) -> None:
    install("spill-odd", stage(contract=99))
    done = spill("build", folder, "--stages", "tune,audit")
    assert done.code == 1
    assert done.error == (
        "spill: stage 'audit' of spill-odd 1.0 speaks contract 99, this spill-core speaks 1: upgrade spill-core"
    )


# ---- names that nobody brings


def test_an_unknown_engine_lists_what_is_installed(
    spill: Spill, install: Install, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("spill-mine", engine("mine"))
    only(monkeypatch, "spill-core", "spill-engine-numpy", "spill-mine")
    done = spill("build", folder, "--engine", "tpu")
    assert (done.code, done.err) == (
        1,
        "spill: unknown engine 'tpu'; installed: mine, numpy; `spill plugins` lists every plugin\n",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "torch-cpu"], "engine 'torch-cpu' is not installed: pip install spill-engine-torch"),
        (["--engine", "torch-cuda"], "engine 'torch-cuda' is not installed: pip install spill-engine-torch"),
        (["--engine", "mlx"], "engine 'mlx' is not installed: pip install spill-engine-mlx"),
        (["--state", "s3://b/x"], "store 's3' is not installed: pip install \"spill-store-cloud[s3]\""),
        (["--state", "gs://b/x"], "store 'gs' is not installed: pip install \"spill-store-cloud[gs]\""),
        (["--state", "az://b/x"], "store 'az' is not installed: pip install \"spill-store-cloud[az]\""),
        (["--state", "ftp://b/x"], "unknown store 'ftp'; installed: file; `spill plugins` lists every plugin"),
        (
            ["--stages", "s3"],
            "unknown stage 's3'; installed: eval:base, eval:tuned, tune; `spill plugins` lists every plugin",
        ),
        (
            ["--stages", "mlx"],
            "unknown stage 'mlx'; installed: eval:base, eval:tuned, tune; `spill plugins` lists every plugin",
        ),
    ],
)
def test_a_known_name_that_is_not_installed_says_what_to_install(
    spill: Spill, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    only(monkeypatch, "spill-core", "spill-engine-numpy")
    done = spill("build", folder, *arguments)
    assert (done.code, done.err) == (1, f"spill: {said}\n")
    assert not (folder / ".spill").exists()


def test_a_known_name_whose_plugin_is_broken_is_not_said_to_be_missing(
    spill: Spill, install: Install, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("spill-engine-mlx", "import no_such_library", version="0.1")
    only(monkeypatch, "spill-core", "spill-engine-numpy", "spill-engine-mlx")
    done = spill("build", folder, "--engine", "mlx")
    assert done.code == 1
    assert done.err.splitlines()[-1] == (
        "spill: unknown engine 'mlx'; installed: numpy; spill-engine-mlx 0.1 may bring it, but is broken "
        "(`spill plugins` shows why)"
    )


# ---- choice


def no_engine_named(folder: Path) -> Path:
    path = folder / "spill.toml"
    path.write_text(path.read_text().replace('engine = "numpy"\n', ""))
    return folder


def test_the_highest_rank_that_is_available_is_chosen(spill: Spill, install: Install, folder: Path) -> None:
    install("spill-a", engine("low", rank=4000, reason="the second best"))
    install("spill-b", engine("high", rank=5000, reason="the best there is"))
    install("spill-c", engine("absent", rank=9000, available=False, reason="no such device"))
    done = spill("build", no_engine_named(folder), "--stop-after", "eval:base:1")
    assert done.code == 0, done.err
    assert " on high (the best there is), float32: " in done.out
    names = spill("doctor", "--names").out.split()
    assert names[:2] == ["high", "low"]
    assert "absent" not in names


def test_equal_ranks_are_settled_by_name(install: Install) -> None:
    install("spill-z", engine("a-engine", rank=7000))
    install("spill-a", engine("z-engine", rank=7000))
    assert discover().choose_engine()[0].name == "a-engine"


@pytest.mark.parametrize(
    ("detection", "reason"),
    [
        ("1 / 0", "detect failed: ZeroDivisionError: division by zero"),
        ("exit(4)", "detect failed: SystemExit: 4"),
        ("None", "detect failed: TypeError: it answered None"),
        ("Detection(available=True, rank='9', reason='')", "detect failed: TypeError: it answered Detection("),
        ("Detection(available=True, rank=9, reason='', dtype='int8')", "detect failed: TypeError: it answered "),
    ],
)
def test_a_detect_that_fails_counts_as_not_available(
    spill: Spill, install: Install, folder: Path, detection: str, reason: str
) -> None:
    install("spill-odd", engine("odd", detection=detection))
    spec = discover().engine("odd")
    seen = detect(spec)
    assert (seen.available, seen.reason.startswith(reason)) == (False, True), seen
    assert spill("build", folder, "--stop-after", "eval:base:1").code == 0
    assert "odd" not in spill("doctor", "--names").out.split()


def test_ctrl_c_is_not_taken_for_a_broken_plugin(install: Install) -> None:
    install("spill-odd", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_no_engine_at_all_says_what_to_install(spill: Spill, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "spill-core")
    done = spill("build", no_engine_named(folder))
    assert (done.code, done.err) == (
        1,
        "spill: no engine is installed: pip install spill-engine-torch, or spill-engine-mlx on Apple silicon\n",
    )


def test_no_engine_that_can_run_gives_every_reason(
    spill: Spill, install: Install, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("spill-a", engine("one", available=False, reason="no driver"))
    install("spill-b", engine("two", available=False, reason='pip install "mlx[cpu]"'))
    install("spill-c", engine("three", contract=99))
    only(monkeypatch, "spill-core", "spill-a", "spill-b", "spill-c")
    done = spill("build", no_engine_named(folder))
    assert done.code == 1
    assert done.err.splitlines()[1:] == [
        "spill: no installed engine can run here; `spill doctor` says more",
        "  one: no driver",
        "  engine 'three' of spill-c 1.0 speaks contract 99, this spill-core speaks 1: upgrade spill-core",
        '  two: pip install "mlx[cpu]"',
    ]
    assert spill("doctor", "--names").out == ""


OPEN_FAILS = """
def open_engine(**how):
    raise {error}
"""


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "chosen by rank"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{module}:open_engine", "engine 'faulty' failed to open tiny: ImportError: libmlx.so: cannot open"),
        ("{module}:missing", "'faulty' was chosen but {module}:missing cannot be loaded: AttributeError: "),
        (
            "{module}:__name__",
            "'faulty' was chosen but {module}:__name__ cannot be loaded: TypeError: it is of type",
        ),
        ("no_such_module:f", "'faulty' was chosen but no_such_module:f cannot be loaded: ModuleNotFoundError: "),
    ],
)
def test_an_engine_that_fails_to_open_is_an_error_and_never_another_engine(
    spill: Spill, install: Install, folder: Path, target: str, said: str, asked: bool
) -> None:
    module = f"faulty_engine_{next(_numbers)}"
    code = OPEN_FAILS.format(error="ImportError('libmlx.so: cannot open\\nshared object')")
    install("spill-faulty", engine("faulty", rank=9000, target=target.format(module=module)) + code, module=module)
    done = spill("build", no_engine_named(folder), *(["--engine", "faulty"] if asked else []))
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert said.format(module=module) in line
    assert one_line(line)
    assert not head(folder / ".spill" / "state").stages, "no other engine did any of the work"


def test_an_engine_asked_for_against_its_own_detect_gives_detects_reason(
    spill: Spill, install: Install, folder: Path
) -> None:
    module = f"absent_engine_{next(_numbers)}"
    code = OPEN_FAILS.format(error="ImportError('libmlx.so: cannot open')")
    reason = 'its CPU part is missing: pip install "mlx[cpu]"'
    detection = f"Detection(available=False, rank=0, reason={reason!r})"
    install("spill-absent", engine("absent", target=f"{module}:open_engine", detection=detection) + code, module=module)
    done = spill("build", folder, "--engine", "absent")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert reason in line
    assert spill("build", folder, "--engine", "numpy", "--stop-after", "eval:base:1").code == 0, "others work"


def test_an_engine_that_exits_is_an_error(spill: Spill, install: Install, folder: Path) -> None:
    module = f"exiting_engine_{next(_numbers)}"
    code = OPEN_FAILS.format(error="SystemExit(0)")
    install("spill-exits", engine("exits", target=f"{module}:open_engine") + code, module=module)
    done = spill("build", folder, "--engine", "exits")
    assert done.code == 1
    assert "engine 'exits' failed to open tiny: SystemExit" in done.error


def test_doctor_names_the_claimants_of_a_clash(install: Install) -> None:
    from spill.doctor import report

    install("spill-one", engine("twin"), version="1.1")
    install("spill-two", engine("twin"), version="2.2")
    registry = discover()
    only_twins = [found.plugin for found in registry.named("engine")["twin"]]
    text = "\n".join(report(Registry(only_twins)))
    assert "spill-one 1.1" in text
    assert "spill-two 2.2" in text


# ---- a third party's stage


@pytest.fixture
def audit(install: Install) -> Path:
    """The stage of tests/core/third_party.py as an installed plugin; the folder it lies in."""
    site = install("spill-audit", stage(), version="0.3")
    source = Path(__file__).with_name("third_party.py").read_text(encoding="utf-8")
    (site / "audit_stage.py").write_text(source, encoding="utf-8")
    return site


STAGES = ["eval:base", "tune", "audit", "eval:tuned"]


def test_a_third_partys_stage_runs_between_ours_and_is_resumed(
    spill: Spill, audit: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=STAGES)
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    stopped = spill("build", folder, "--state", tmp_path / "halves", "--stop-after", "audit:3")
    assert stopped.code == 0, stopped.err
    assert "stopped as asked at audit 3/10; next: spill resume" in stopped.out
    monkeypatch.setenv("SPILL_MACHINE", "beta")
    done = spill("resume", folder, "--state", tmp_path / "halves")
    assert done.code == 0, done.err
    assert everything(tmp_path / "halves") == everything(tmp_path / "whole")
    lines = done.out.splitlines()
    (audited,) = [line for line in lines if line.startswith("3 audit")]
    assert audited.split()[1:6] == ["audit", "numpy", "alpha", "->", "beta"]
    (graded,) = [line for line in lines if line.startswith("4 eval:tuned")]
    assert graded.split()[1:4] == ["eval:tuned", "numpy", "beta"]
    commit = head(tmp_path / "halves")
    assert commit.plan.plugins == {
        "eval:base": "spill-core",
        "tune": "spill-core",
        "audit": "spill-audit",
        "eval:tuned": "spill-core",
    }
    assert isinstance(commit.stages["audit"].summary["score"], float)


def test_a_state_names_the_stage_plugin_that_is_missing_here(
    spill: Spill, audit: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=STAGES)
    state = tmp_path / "state"
    assert spill("build", folder, "--state", state, "--stop-after", "audit:2").code == 0
    before = files(state)
    install_plugin(audit, distribution="spill-audit-elsewhere", module="nothing")
    only(monkeypatch, "spill-core", "spill-engine-numpy")
    for target in ([folder, "--state", state], [state, "--student", model, "--engine", "numpy"]):
        done = spill("resume", *target)
        assert (done.code, done.err) == (
            1,
            "spill: the state has a stage 'audit' of 'spill-audit', and nothing installed here brings it: "
            "pip install spill-audit\n",
        )
    assert files(state) == before
    table = spill("table", state)
    assert (table.code, table.err) == (0, ""), "looking needs no plugin"
    assert "3 audit" in table.out


def test_a_stage_plugin_that_is_broken_here_is_not_said_to_be_missing(
    spill: Spill, audit: Path, model: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=STAGES)
    assert spill("build", folder, "--stop-after", "eval:base:1").code == 0
    (entry,) = [e.value for e in metadata.entry_points(group="spill") if e.name == "spill-audit"]
    (audit / f"{entry}.py").write_text("import no_such_library")
    sys.modules.pop(entry)
    done = spill("resume", folder)
    assert done.code == 1
    assert done.err.splitlines()[-1].endswith(
        "spill-audit 0.3 is broken: ModuleNotFoundError: No module named 'no_such_library' (`spill plugins` shows all "
        "of it)"
    )


@pytest.mark.parametrize("named", ["x --index-url http://evil/ x", "http://evil/x.whl", "-r", "", "a;b", "x\x1b[0m"])
def test_a_state_cannot_put_words_into_a_pip_command(spill: Spill, model: Path, tmp_path: Path, named: str) -> None:
    folder = write_folder(tmp_path / "folder", model)
    assert spill("build", folder, "--stop-after", "eval:base:1").code == 0

    def change(commit: dict[str, dict[str, object]]) -> None:
        commit["plan"]["stages"] = ["eval:base", "tune", "strange", "eval:tuned"]
        commit["plan"]["plugins"] = {"strange": named}

    rewrite(folder / ".spill" / "state", change)
    done = spill("resume", folder)
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert one_line(line)
    assert "pip install" not in line
    assert line.endswith("nothing installed here brings it: install the plugin that brings it")


FAULTY_STAGE = """
from spill.stages import Progress, Snapshot

class Faulty:
    unit = "row"
    total = 2
    position = 0
    def __init__(self, work):
        {opening}
    def advance(self, limit):
        yield Progress(position=1)
        {advancing}
    def snapshot(self):
        return Snapshot()
"""


@pytest.mark.parametrize(
    ("opening", "advancing"), [("raise TypeError('opening')", "pass"), ("pass", "raise ZeroDivisionError('advancing')")]
)
def test_a_stage_that_fails_is_one_line_and_the_last_commit_stands(
    spill: Spill, install: Install, model: Path, tmp_path: Path, opening: str, advancing: str
) -> None:
    site = install("spill-faulty", stage("faulty", target="faulty_stage:Faulty"))
    (site / "faulty_stage.py").write_text(FAULTY_STAGE.format(opening=opening, advancing=advancing))
    folder = write_folder(tmp_path / "folder", model, stages=["tune", "faulty"])
    done = spill("build", folder)
    sys.modules.pop("faulty_stage", None)
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith("spill: ")
    assert "opening" in line or "advancing" in line
    assert head(folder / ".spill" / "state").stages["tune"].finished


# ---- real processes


def test_a_real_process_finds_the_plugins_and_a_second_one_without_them_says_so(
    spill_process: Callable[..., subprocess.Popen[str]], audit: Path, model: Path, tmp_path: Path
) -> None:
    install_plugin(audit, distribution="spill-broken", module="module_that_is_not_there")
    folder = write_folder(tmp_path / "folder", model, stages=["tune", "audit"])
    first = spill_process("build", folder, "--stop-after", "audit:1", path=[audit])
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert "stopped as asked at audit 1/10" in out
    assert [line for line in err.splitlines() if "spill-broken 1.0 is broken" in line] == err.splitlines()
    second = spill_process("resume", folder)
    out, err = second.communicate(timeout=120)
    assert (second.returncode, out) == (1, "")
    assert err.startswith("spill: the state has a stage 'audit' of 'spill-audit', and nothing installed here")


def test_detections_are_plain_records() -> None:
    seen = Detection(available=True, rank=1, reason="x")
    assert seen.dtype == "float32"
    with pytest.raises(AttributeError):
        seen.rank = 2  # type: ignore[misc]
