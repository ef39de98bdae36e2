"""The one place that opens a model's tokenizer, for the trainer, the engine and everything else.

    tokenizer = open_tokenizer(folder)            what transformers opens, if it splits text as tokenizer.json says;
                                                  tokenizer.json itself otherwise
    with tokenizer_folder(folder) as path: …      the same for a program that loads its own (vLLM)
    decode = open_decoder(folder)                 token ids → text only, in a hundredth of the time

Published folders declare classes that rebuild the pipeline of tokenizer.json in their own way: transformers 5 opens the
tokenizers of R1-Distill-Llama-8B and R1-0528-Qwen3-8B as LlamaTokenizer, which silently drops every space. Therefore
every tokenizer is checked when it is opened: a text with spaces, newlines, digits and mark-up must give the ids that
tokenizer.json gives, and come back with its white space.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dccot.core.files import BadData, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SPACED = "Find $x^2$ when x = 12.\n\nLet's think  about 3,141 and  a (b) case:\n    "
PROBE = SPACED + "<a_list>\n<item_1>I'll try.</item_1><item_2>\n\nNo</item_2></a_list> Ünï cöde, 数学, ≤ 5\n"


def open_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the model in `folder`; BadData or OSError if none preserves white space."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes a second to import; keeps --help fast

    with _no_panic(Path(folder)):
        expected = _ids_of_file(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if expected is not None and _ids(tokenizer) != expected:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            if _ids(tokenizer) != expected:
                differs = "splits text differently from its tokenizer.json; save it again with transformers"
                raise BadData(f"the tokenizer of {folder} {differs}")
    if lost := lost_white_space(tokenizer):
        proof = f"{lost[0]!r} comes back as {lost[1]!r}"
        raise BadData(f"the tokenizer of {folder} loses white space: {proof}; fetch its files again")
    return tokenizer


def open_decoder(folder: str | Path) -> Callable[[Sequence[int]], str]:
    """Token ids → their text, special tokens included: by tokenizer.json alone, because transformers takes seconds to
    import, unless there is none or tokens are declared elsewhere.
    """
    folder = Path(folder)
    with _no_panic(folder):
        if tokenizer := _tokenizer_json(folder):
            beside = read_json(path, "fetch it again") if (path := folder / "tokenizer_config.json").is_file() else {}
            declared = map(int, beside.get("added_tokens_decoder", {}))
            if all(tokenizer.id_to_token(token) is not None for token in declared):
                return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    opened = open_tokenizer(folder)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return lambda ids: str(opened.decode(list(ids), **options))


@contextlib.contextmanager
def tokenizer_folder(folder: str | Path) -> Iterator[str]:
    """A folder from which AutoTokenizer loads what `open_tokenizer` does: the model's own, or a repaired copy."""
    from transformers import AutoTokenizer

    tokenizer = open_tokenizer(folder)
    if _ids(AutoTokenizer.from_pretrained(folder)) == _ids(tokenizer):
        yield str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="dccot-tokenizer-") as repaired:
        tokenizer.save_pretrained(repaired)
        yield repaired


def lost_white_space(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """A text and its round trip, if the letters alone survive. A vocabulary that cannot spell those proves nothing."""

    def back(text: str) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).strip()

    for text in (SPACED, "a b", "a\nb"):
        letters = "".join(text.split())
        if back(letters) == letters and (found := back(text)) != text.strip():
            return text, found
    return None


@contextlib.contextmanager
def _no_panic(folder: Path) -> Iterator[None]:
    """Rust's panics, as for a pattern that would take forever, are no Exceptions: they would pass all our handlers."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BadData(
            f"the tokenizer of {folder} fails ({' '.join(str(error).split())[:200]}); use another one"
        ) from None


def _ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer.encode(PROBE, add_special_tokens=False))


def _ids_of_file(folder: Path) -> list[int] | None:
    """The probe's ids according to tokenizer.json alone; None for a model without that file."""
    tokenizer = _tokenizer_json(folder)
    return tokenizer and tokenizer.encode(PROBE, add_special_tokens=False).ids


def _tokenizer_json(folder: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing more specific
        raise BadData(f"{path} is damaged or a git-LFS pointer ({error}); fetch it again") from None
    tokenizer.no_truncation()  # transformers ignores how training code last cut and padded its batches, and so do we
    tokenizer.no_padding()
    return tokenizer
