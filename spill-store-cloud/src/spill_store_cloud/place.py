"""A state's place in a bucket, parsed from its URI, and the texts that errors are made of."""

import importlib
import re
from types import ModuleType

from attrs import frozen

from spill.errors import InputError, PluginError

FOLDER_LIMIT = 512
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_ODD = re.compile(r"[^A-Za-z0-9._=/-]")
_SECRETS = re.compile(r"(?i)(AccountKey|SharedAccessSignature|sig|signature|token|secret|password)=[^\s;&,'\"]+")
_USER = re.compile(r"(https?://)[^\s/@'\"]+@")
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")


@frozen(kw_only=True)
class Place:
    """A bucket and a folder in it; `uri` is the one way to write them."""

    bucket: str
    folder: str
    uri: str


def parse(uri: str, scheme: str) -> Place:
    """The place that `scheme://bucket/folder` names.

    The rule: a bucket, then one or more names divided by single slashes, of ASCII letters, digits and `.`, `_`, `-`,
    `=`. One slash at the end is dropped, so that it names the same state. Everything else is refused: what one tool
    escapes, another cuts off and a third stores as it is would be several states under one name.

    Raises:
        InputError: the URI does not follow the rule; says where.
    """
    found, divider, rest = uri.partition("://")
    form = f"{scheme}://BUCKET/FOLDER"
    if not divider or found.lower() != scheme:
        raise InputError(f"{uri!r} is not of the form {form}")
    bucket, _, folder = rest.partition("/")
    folder = folder.removesuffix("/")
    if "@" in bucket:
        raise InputError(
            "the URI of a state names no account and no key, and this one has something before "
            f"{bucket[bucket.rindex('@') :]!r}: set them in the environment and write {form}"
        )
    shown = clean(uri)
    if not _BUCKET.fullmatch(bucket):
        raise InputError(f"{shown!r} has no usable bucket name ({bucket!r}); write {form}")
    if not folder:
        raise InputError(
            f"{shown!r} is the root of a bucket: give a folder in the bucket, such as {scheme}://{bucket}/relay"
        )
    names = folder.split("/")
    if "" in names:
        raise InputError(f"{shown!r} has a double slash; write {form} with single ones")
    if "." in names or ".." in names:
        raise InputError(f"{shown!r} has a name of dots only, which a bucket does not resolve; write the folder itself")
    if odd := _ODD.search(folder):
        raise InputError(
            f"{shown!r} holds {odd[0]!r}: a folder in a bucket is of letters without accents, digits and . _ - ="
        )
    if len(folder) > FOLDER_LIMIT:
        raise InputError(
            f"the folder of {shown[:80]!r}... has {len(folder)} characters, at most {FOLDER_LIMIT} are possible"
        )
    return Place(bucket=bucket, folder=folder, uri=f"{scheme}://{bucket}/{folder}")


def library(name: str, scheme: str) -> ModuleType:
    """Import a provider's library.

    Raises:
        PluginError: it is not installed, or broken.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise PluginError(
                f"{scheme}:// needs {name}, which lacks {error.name}: pip install {error.name}"
            ) from error
        raise PluginError(
            f'{scheme}:// needs {name}, which is not installed: pip install "spill-store-cloud[{scheme}]"'
        ) from error
    except Exception as error:
        raise PluginError(f"{scheme}:// needs {name}, which cannot be imported: {clean(str(error))}") from error


def clean(text: str) -> str:
    """One line of a foreign text, at most 300 characters, without control characters, URLs' users and queries, and
    secrets."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _SECRETS.sub(r"\1=...", _QUERY.sub(r"\1?...", _USER.sub(r"\1", line)))[:300]
