"""Tokenizers: BERT's WordPiece, trained on a corpus or read from a file, and CLIP's; used on batches of captions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from components.io.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER_FILE = "tokenizer.json"
PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
START, END = "<|startoftext|>", "<|endoftext|>"  # CLIP's
WORD_END = "</w>"  # ends a word in CLIP's vocabulary
NONE = -1  # the id of a special token that CLIP does not have
CONTINUES = "##"  # marks a piece that does not begin a word
ALPHABET_LIMIT = 1000  # characters; rarer ones become [UNK] and so do not fill a small vocabulary


class Tokenizer:
    """A WordPiece tokenizer with BERT's special tokens, or CLIP's. Can be pickled; not shared between threads.

    CLIP's start and end stand in the place of [CLS] and [SEP], its end in that of [PAD] too; others it has not.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Wrap `inner`; raises UserError when it lacks one of BERT's five special tokens and is not CLIP's."""
        self.inner = inner
        inner.encode_special_tokens = True  # "[SEP]" written in a caption is text, not the end of it
        self.is_clip = isinstance(inner.model, models.BPE) and None not in (
            inner.token_to_id(START),
            inner.token_to_id(END),
        )
        special = (END, None, START, END, None) if self.is_clip else SPECIAL_TOKENS
        numbers = [NONE if token is None else inner.token_to_id(token) for token in special]
        missing = [str(token) for token, number in zip(special, numbers, strict=True) if number is None]
        if missing:
            raise UserError(
                f"the tokenizer lacks the special tokens {' '.join(missing)}: use a BERT WordPiece vocabulary"
            )
        ids = [int(number) for number in numbers if number is not None]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = ids
        inner.enable_padding(pad_id=self.pad_id, pad_token=str(special[0]))

    def __reduce__(self) -> tuple[Callable[[str], Tokenizer], tuple[str]]:
        return _unpickle, (self.inner.to_str(),)  # the library's own pickle forgets `encode_special_tokens`

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the highest id plus one."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of [PAD] [UNK] [CLS] [SEP] [MASK], in this order; -1 for what CLIP has not."""
        return (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)

    def encode_batch(self, captions: Sequence[str], max_tokens: int) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask of captions, padded to the longest of them.

        Returns `input_ids` (B, L) int64 and `attention_mask` (B, L) int64 of ones and, over padding, zeros, where
        L ≤ `max_tokens`. A longer caption loses its end but keeps its [CLS] and [SEP], which `max_tokens` counts.
        Raises ValueError when `max_tokens` leaves no room for a word.
        """
        import torch

        if max_tokens < len((CLS, SEP)) + 1:
            raise ValueError(f"{max_tokens=} leaves no room for a word between [CLS] and [SEP]")
        truncation = self.inner.truncation
        if truncation is None or truncation["max_length"] != max_tokens:
            self.inner.enable_truncation(max_tokens)
        if not captions:
            return torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.int64)
        encodings = self.inner.encode_batch_fast(list(captions))
        input_ids = torch.tensor([encoding.ids for encoding in encodings], dtype=torch.int64)  # (B, L)
        mask = torch.tensor([encoding.attention_mask for encoding in encodings], dtype=torch.int64)  # (B, L)
        return input_ids, mask

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The token of each id, special tokens included."""
        return [str(self.inner.id_to_token(index)) for index in ids]

    def words(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Words with the positions of their pieces; special tokens are none."""
        found: list[list[int]] = []
        ended = True
        pieces = self.tokens(ids)
        for place, (number, piece) in enumerate(zip(ids, pieces, strict=True)):
            if number in self.special_ids and number != self.unk_id:
                continue
            goes_on = not ended if self.is_clip else piece.startswith(CONTINUES)
            ended = piece.endswith(WORD_END)
            if goes_on and found:
                found[-1].append(place)
            else:
                found.append([place])
        if self.is_clip:  # its pieces are bytes, which only together may be a letter
            return [(self.decode(ids[place] for place in word).removesuffix(WORD_END), word) for word in found]
        return [("".join(pieces[place].removeprefix(CONTINUES) for place in word), word) for word in found]

    def save(self, path: Path) -> None:
        """Write ``tokenizer.json``: the vocabulary and rules, without the padding and truncation of the last call."""
        copy = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copy.no_padding()
        copy.no_truncation()
        path.write_text(copy.to_str(pretty=True) + "\n", encoding="utf-8")


def _unpickle(text: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(text))


def bert_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    """BERT's uncased pipeline around a WordPiece vocabulary: clean, lower-case, strip accents, split punctuation."""
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise UserError(f"the vocabulary lacks the special tokens {' '.join(missing)}: use a BERT WordPiece vocabulary")
    inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=UNK))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single=f"{CLS}:0 $A:0 {SEP}:0",
        pair=f"{CLS}:0 $A:0 {SEP}:0 $B:1 {SEP}:1",
        special_tokens=[(CLS, vocabulary[CLS]), (SEP, vocabulary[SEP])],
    )
    inner.decoder = decoders.WordPiece(prefix=CONTINUES)
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(inner)


def train_tokenizer(
    captions: Callable[[], Iterator[str]], vocab_size: int, min_frequency: int, words: Sequence[str] = ()
) -> Tokenizer:
    """Train WordPiece on a corpus: the same captions, in any order, give the same vocabulary.

    `words` are pieces of their own, and their characters can be written, whether the captions have them or not.

    `captions()` starts a fresh pass over the corpus; there are two. The library numbers the pieces of one character in
    the order of a randomly seeded hash map, and settles ties between merges by number; so the alphabet is counted and
    ordered here, and the pieces of one character go in as if they were special tokens, which keep their order.
    """
    alphabet, continuing = _count_characters(captions(), ALPHABET_LIMIT)
    characters = set("".join(words))
    alphabet, continuing = sorted(characters.union(alphabet)), sorted(characters.union(continuing))
    whole = sorted({word for word in words if len(word) > 1})
    first = [*SPECIAL_TOKENS, *(CONTINUES + character for character in continuing), *whole]
    room = len(first) + len(alphabet)
    if room > vocab_size:
        raise UserError(
            f"shard.tokenizer.vocab_size is {vocab_size}, but the special tokens and the characters of these captions "
            f"{'and words ' if words else ''}alone are {room}: set it higher"
        )
    scratch = tokenizers.Tokenizer(models.WordPiece(unk_token=UNK))
    scratch.normalizer = normalizers.BertNormalizer(lowercase=True)
    scratch.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    scratch.train_from_iterator(captions(), trainer)
    return bert_tokenizer(scratch.get_vocab(with_added_tokens=False))


def _count_characters(captions: Iterable[str], limit: int) -> tuple[list[str], list[str]]:
    """The `limit` most frequent characters of the words, and those of them that stand inside a word; both sorted."""
    chunks: Counter[str] = Counter()
    for caption in captions:
        chunks.update(caption.split())
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    characters: Counter[str] = Counter()
    inside: set[str] = set()
    for chunk, count in chunks.items():
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(chunk)):
            for character in word:
                characters[character] += count
            inside.update(word[1:])
    frequent = sorted(characters, key=lambda character: (-characters[character], character))[:limit]
    return sorted(frequent), sorted(inside.intersection(frequent))


def load_tokenizer(path: Path, *, clip: bool = False) -> Tokenizer:
    """A tokenizer from ``tokenizer.json`` (any folder that holds one will do) or BERT's ``vocab.txt``.

    `clip` says that CLIP's will do as well. Raises UserError when the file is missing, is neither, or lacks a special
    token.
    """
    if path.is_dir():
        path = path / TOKENIZER_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"the tokenizer {path} does not exist: run the stage that writes it, or give a tokenizer.json or vocab.txt"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the tokenizer {path} cannot be read ({error}): give a tokenizer.json or vocab.txt") from None
    try:
        return _parse_json(text, clip) if path.suffix == ".json" else bert_tokenizer(_parse_vocabulary(text))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _parse_json(text: str, clip: bool) -> Tokenizer:
    try:
        content: dict[str, Any] = json.loads(text)
        kind = content["model"]["type"]
    except (ValueError, KeyError, TypeError):
        raise UserError("this is not a tokenizer.json of the tokenizers library: give one, or a vocab.txt") from None
    if kind != "WordPiece" and not (clip and kind == "BPE"):
        own = "BERT WordPiece or CLIP's BPE" if clip else "BERT WordPiece"
        raise UserError(f"this tokenizer is {kind}, the models here read {own}: give a tokenizer of that kind")
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"this tokenizer.json is damaged ({error}): write it again") from None
    if kind == "BPE" and not _has_ends(inner):
        raise UserError(f"this BPE tokenizer is not CLIP's, which has {START} and {END}: give CLIP's tokenizer.json")
    return Tokenizer(inner)


def _has_ends(inner: tokenizers.Tokenizer) -> bool:
    """Whether both of CLIP's special tokens stand around a text."""
    ids = inner.encode("a").ids
    return len(ids) > 2 and (ids[0], ids[-1]) == tuple(inner.token_to_id(token) for token in (START, END))


def _parse_vocabulary(text: str) -> dict[str, int]:
    tokens = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]  # splitlines cuts at U+0085 too
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise UserError(f"the vocabulary names {twice!r} twice: give a vocab.txt with one token per line")
    return {token: index for index, token in enumerate(tokens)}
