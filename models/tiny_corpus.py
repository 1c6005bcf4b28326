"""The tiny decoder's text: standard-library source of the running Python, never copied here."""

import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError

Split = Literal["train", "eval"]

# Both lists are fixed: the weights were trained on the first, and what is measured on the
# second counts only while the two stay apart. All are there in Python 3.11 to 3.13.
_TRAIN = """
    abc argparse ast asyncio.base_events asyncio.events asyncio.futures asyncio.locks
    asyncio.queues asyncio.selector_events asyncio.streams asyncio.subprocess asyncio.tasks
    asyncio.transports asyncio.unix_events base64 bdb bz2 cmd code codecs collections.__init__
    compileall concurrent.futures._base concurrent.futures.process concurrent.futures.thread
    contextlib copy copyreg cProfile csv dataclasses datetime dbm.dumb difflib dis doctest
    email._header_value_parser email.charset email.feedparser email.generator email.header
    email.headerregistry email.message email.policy email.utils enum filecmp fileinput fnmatch
    ftplib functools getopt getpass gettext glob gzip hashlib hmac html.parser http.client
    http.cookiejar http.cookies http.server imaplib importlib._bootstrap
    importlib._bootstrap_external importlib.metadata.__init__ importlib.util inspect io ipaddress
    json.decoder json.encoder keyword linecache locale logging.__init__ logging.config
    logging.handlers lzma mailbox mimetypes multiprocessing.connection multiprocessing.context
    multiprocessing.heap multiprocessing.managers multiprocessing.pool multiprocessing.process
    multiprocessing.queues multiprocessing.shared_memory multiprocessing.synchronize
    multiprocessing.util numbers optparse os pdb pickle pickletools pkgutil platform plistlib
    poplib posixpath pprint profile pstats py_compile pyclbr pydoc quopri random reprlib
    rlcompleter runpy sched secrets selectors shelve shutil signal site smtplib socket
    socketserver ssl stat string struct subprocess symtable tabnanny tarfile tempfile
    threading timeit tokenize trace traceback tracemalloc turtle types typing unittest.case
    unittest.loader unittest.main unittest.mock unittest.result unittest.runner unittest.suite
    urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.dom.expatbuilder
    xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree xml.sax.expatreader xml.sax.saxutils
    xmlrpc.client xmlrpc.server zipapp zipimport
"""
_EVAL = """
    bisect calendar colorsys configparser fractions graphlib heapq netrc queue shlex
    statistics textwrap urllib.robotparser wsgiref.handlers wsgiref.simple_server
"""


def modules(split: Split) -> tuple[str, ...]:
    """The dotted names of the modules whose source is the split's text, in order.

    Raises:
        InputError: the split is neither "train" nor "eval".
    """
    if split not in ("train", "eval"):
        raise InputError(f"unknown split {split!r}, wanted 'train' or 'eval'")
    return tuple((_TRAIN if split == "train" else _EVAL).split())


def text(split: Split = "train") -> bytes:
    """The source and docstrings of the split's modules, each after the last; newlines are LF.

    It is the same on every machine with one Python version.

    Raises:
        InputError: an unknown split, or this Python comes without a module's source.
    """
    library = Path(sysconfig.get_path("stdlib"))
    pieces = []
    for name in modules(split):
        path = library.joinpath(*name.split(".")).with_suffix(".py")
        try:
            pieces.append(path.read_bytes().replace(b"\r\n", b"\n"))
        except OSError as error:
            raise InputError(f"this Python has no source of its module {name}: {error}") from error
    return b"\n".join(pieces)


def batches(split: Split, length: int, count: int) -> NDArray[np.int64]:
    """`[count, length]` int64 byte values: windows evenly spread over the split's text.

    Raises:
        InputError: length or count is below 1, or the text is shorter than one window.
    """
    data = np.frombuffer(text(split), dtype=np.uint8)
    if length < 1 or count < 1 or length > data.size:
        raise InputError(
            f"no {count} windows of {length} bytes: the {split} text has {data.size} bytes"
        )
    starts = np.linspace(0, data.size - length, count).astype(np.int64)
    windows: NDArray[np.int64] = data[starts[:, None] + np.arange(length)].astype(np.int64)
    return windows


def bits_per_byte(logits: NDArray[np.floating], ids: NDArray[np.int64]) -> float:
    """Mean -log2 p of each byte after a window's first, from `[B, T, 256]` and `[B, T]`."""
    wide = logits[:, :-1].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    chosen = np.take_along_axis(wide, ids[:, 1:, None], -1)[..., 0]
    nats = np.log(np.exp(wide).sum(-1)) - chosen
    return float(nats.mean() / np.log(2))
