"""The tokenizer: the same vocabulary every time, BERT's special tokens, and captions that stay inside theirs."""

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.tokenizer import SPECIAL_TOKENS, bert_tokenizer, load_tokenizer, train_tokenizer
from components.io.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

CORPUS = """
import random
r = random.Random(0)
letters = [chr(code) for code in [*range(97, 123), *range(0x400, 0x400 + 1500)]]
def word():
    return "".join(r.choice(letters[:26] if r.random() < 0.9 else letters) for _ in range(r.randint(1, 8)))
words = [word() for _ in range(1500)]
captions = [" ".join(r.choice(words) for _ in range(10)) for _ in range(600)]
"""
TRAIN = """
import hashlib, sys
from pathlib import Path
from components.data.tokenizer import train_tokenizer
tokenizer = train_tokenizer(lambda: iter(captions), 3000, 2)
tokenizer.save(Path(sys.argv[1]))
"""


def corpus() -> list[str]:
    names: dict = {}
    exec(CORPUS, names)
    return names["captions"]


@pytest.fixture(scope="module")
def tokenizer():
    captions = ["A large red cube is behind a small blue sphere.", "Two dogs run on the beach"] * 20
    return train_tokenizer(lambda: iter(captions), 200, 2)


def test_training_gives_the_same_bytes_in_every_process_and_order(tmp_path: Path) -> None:
    """More distinct characters than the alphabet holds, so ties among rare ones must be settled too."""
    captions = corpus()
    random.Random(1).shuffle(captions)
    train_tokenizer(lambda: iter(captions), 3000, 2).save(tmp_path / "here.json")
    for name, threads in (("one", "1"), ("many", "4")):
        subprocess.run(
            [sys.executable, "-c", CORPUS + TRAIN, str(tmp_path / f"{name}.json")],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)},
            check=True,
        )
    here = (tmp_path / "here.json").read_bytes()
    assert (tmp_path / "one.json").read_bytes() == here
    assert (tmp_path / "many.json").read_bytes() == here


def test_every_word_of_the_corpus_can_be_written(tokenizer) -> None:
    ids, mask = tokenizer.encode_batch(["a large red cube is behind a small blue sphere ."], 64)
    assert tokenizer.unk_id not in ids[0].tolist()
    assert tokenizer.decode(ids[0].tolist()) == "a large red cube is behind a small blue sphere."
    assert mask.sum() == ids.shape[1]


def test_special_ids_are_first_and_in_bert_order(tokenizer) -> None:
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert tokenizer.tokens(range(5)) == list(SPECIAL_TOKENS)


def test_batch_is_padded_to_its_longest_and_truncation_keeps_the_ends(tokenizer) -> None:
    long, short = "two dogs run on the beach " * 20, "dogs"
    ids, mask = tokenizer.encode_batch([long, short], 12)
    assert ids.shape == mask.shape == (2, 12)
    assert ids[0, 0] == tokenizer.cls_id
    assert ids[0, -1] == tokenizer.sep_id
    length = int(mask[1].sum())
    assert ids[1, length - 1] == tokenizer.sep_id
    assert (ids[1, length:] == tokenizer.pad_id).all()
    assert (ids[1, :length] != tokenizer.pad_id).all()
    alone, _ = tokenizer.encode_batch([short], 12)
    assert alone.tolist() == [ids[1, :length].tolist()]
    assert tokenizer.encode_batch([long], 30)[0].shape == (1, 30)  # the last call's length is not kept


def test_no_caption_gives_an_empty_batch(tokenizer) -> None:
    ids, mask = tokenizer.encode_batch([], 12)
    assert ids.shape[0] == mask.shape[0] == 0


def test_length_without_room_for_a_word_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        tokenizer.encode_batch(["dogs"], 2)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.integers(3, 16))
def test_any_text_is_enclosed_once(tokenizer, text: str, max_tokens: int) -> None:
    """A caption that spells a special token must not become one: it would end the caption or mask a word."""
    for caption in (text, f"{text} [SEP] [MASK][PAD] [CLS]"):
        ids, _ = tokenizer.encode_batch([caption], max_tokens)
        row = ids[0].tolist()
        assert row[0] == tokenizer.cls_id
        assert row[-1] == tokenizer.sep_id
        assert len(row) <= max_tokens
        inside = set(row[1:-1])
        assert not inside & {tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id}


def test_a_pickled_tokenizer_reads_the_same(tokenizer) -> None:
    caption = "a [SEP] red cube [MASK]"
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode_batch([caption], 20)[0].tolist() == tokenizer.encode_batch([caption], 20)[0].tolist()


def test_saved_file_reads_back_the_same_and_does_not_depend_on_use(tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    before = (tmp_path / "tokenizer.json").read_bytes()
    tokenizer.encode_batch(["two dogs"], 7)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    again = load_tokenizer(tmp_path)
    assert again.vocab_size == tokenizer.vocab_size
    assert (
        again.encode_batch(["two red dogs"], 9)[0].tolist() == tokenizer.encode_batch(["two red dogs"], 9)[0].tolist()
    )


def test_vocab_txt_agrees_with_transformers(tmp_path: Path) -> None:
    import transformers

    tokens = [
        *SPECIAL_TOKENS,
        *"abcdefghijklmnopqrstuvwxyz.'-",
        *("##" + letter for letter in "abcdefghijklmnopqrstuvwxyz"),
        "dog",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    ours = load_tokenizer(tmp_path / "vocab.txt")
    theirs = transformers.BertTokenizer(vocab={token: index for index, token in enumerate(tokens)})
    for caption in ("The dog's Café - a DOG!", "dogs", "", "日本 dog"):
        assert ours.encode_batch([caption], 32)[0][0].tolist() == theirs(caption)["input_ids"], caption
    assert ours.vocab_size == len(tokens)


def test_vocabulary_too_small_for_the_characters() -> None:
    with pytest.raises(UserError, match=r"vocab_size is 10, but .* alone are \d+"):
        train_tokenizer(lambda: iter(["the quick brown fox"]), 10, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not a tokenizer.json"),
        ("tokenizer.json", "[]", "not a tokenizer.json"),
        ("tokenizer.json", json.dumps({"model": {"type": "BPE"}}), "this tokenizer is BPE"),
        ("tokenizer.json", json.dumps({"model": {"type": "WordPiece"}}), "damaged"),
        ("vocab.txt", "a\nb\n", r"lacks the special tokens \[PAD\]"),
        ("vocab.txt", "a\nb\na\n", "names 'a' twice"),
    ],
)
def test_a_file_that_is_no_bert_tokenizer_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        load_tokenizer(tmp_path / "nowhere.json")


def test_vocabulary_without_special_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"\[MASK\]"):
        bert_tokenizer({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3})


def test_words_that_captions_lack_can_be_written() -> None:
    """Answers of VQA are words and numbers that no caption need contain."""
    captions = ["a red cube"] * 20
    words = ["how", "many", "2", "10", "exactly"]
    texts = ["how many", "2", "10", "exactly", "102"]
    plain, wider = (train_tokenizer(lambda: iter(captions), 200, 2, given) for given in ((), words))
    assert all(plain.unk_id in row for row in plain.encode_batch(texts, 9)[0].tolist())
    ids, _ = wider.encode_batch(texts, 9)
    assert wider.unk_id not in ids
    pieces = [[piece for piece in wider.tokens(row) if piece[0] != "["] for row in ids.tolist()]
    assert pieces == [["how", "many"], ["2"], ["10"], ["exactly"], ["10", "##2"]]
    assert wider.special_ids == plain.special_ids
    again = train_tokenizer(lambda: iter(captions), 200, 2, words[::-1])
    assert again.inner.to_str() == train_tokenizer(lambda: iter(captions), 200, 2, words).inner.to_str()
