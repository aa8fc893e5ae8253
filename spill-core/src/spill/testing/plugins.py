"""Registering plugins for tests: real entry points in a folder of their own. Imports no numpy."""

from pathlib import Path


def install_plugin(
    site_directory: Path, *, distribution: str, module: str, version: str = "1.0", entry_name: str | None = None
) -> Path:
    """Write the metadata of an installed distribution whose entry point of group `spill` names `module`.

    A process started with `PYTHONPATH=site_directory` finds it like any other plugin. The module itself is not
    written: it lies on the path already (`spill.testing.numpy_plugin`), or the caller puts it into the folder.

    Args:
        entry_name: the entry point's name; by default the distribution's.

    Returns:
        The `.dist-info` folder.
    """
    info = site_directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[spill]\n{entry_name or distribution} = {module}\n", encoding="utf-8")
    return info
