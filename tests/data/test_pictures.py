"""Pictures of every kind, made here, and what normalisation makes of them."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from components.data.cleaning.pictures import Picture, PictureParams, normalise, open_picture, why
from components.io.outcomes import Reason

PARAMS = PictureParams(min_side=8)


def scene(mode="RGB", size=(48, 32)):
    """A smooth picture whose corners differ: dark top left, red to the right, green downwards."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 64)], -1).astype(np.uint8), "RGB").convert(mode)


def save(image, kind, **options):
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def pixels(data):
    return np.asarray(open_picture(data)).astype(int)


def kept(data, params=PARAMS):
    picture = normalise(data, params)
    assert isinstance(picture, Picture), picture
    with Image.open(io.BytesIO(picture.data)) as image:
        assert (image.mode, image.size) == ("RGB", (picture.width, picture.height))
        assert image.format == ("JPEG" if params.encode == "jpeg" else "PNG")
        assert image.getexif().get(274, 1) == 1
    return picture


def test_a_good_jpeg_keeps_its_bytes():
    data = save(scene(), "JPEG", quality=60)
    assert kept(data) == Picture(data, 48, 32)
    progressive = save(scene(), "JPEG", progressive=True)
    assert kept(progressive).data == progressive


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("TIFF", {"compression": "tiff_lzw"})],
)
def test_lossless_kinds_become_rgb_jpeg(kind, options):
    picture = kept(save(scene(), kind, **options))
    assert picture.changes == (kind.lower(),)
    assert np.abs(pixels(picture.data) - np.asarray(scene())).mean() < 3


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_other_modes(mode):
    image = scene(mode)
    picture = kept(save(image, "PNG"), PARAMS.model_copy(update={"encode": "png"}))
    assert (pixels(picture.data) == np.asarray(image.convert("RGB"))).all()
    assert picture.changes == (mode.lower(),)


def test_grey_jpeg_becomes_rgb():
    assert kept(save(scene("L"), "JPEG")).changes == ("l",)


def test_cmyk_keeps_its_colours():
    picture = kept(save(scene("CMYK"), "JPEG", quality=95))
    assert picture.changes == ("cmyk",)
    assert np.abs(pixels(picture.data) - np.asarray(scene())).mean() < 6
    assert "cmyk" in kept(save(scene("CMYK"), "TIFF")).changes


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_contrast(kind):
    ramp = np.tile(np.linspace(0, 65535, 64), (32, 1)).astype(np.uint16)
    picture = kept(save(Image.fromarray(ramp), kind))
    got = pixels(picture.data)[..., 0]
    assert "deep" in picture.changes
    assert np.abs(got - ramp / 257).max() < 8


def test_sixteen_bit_colour():
    """Pillow cannot write 16-bit RGB, so the PNG is put together by hand: its left half black, its right half grey."""
    row = b"\0" + struct.pack(">3H", 0, 0, 0) * 16 + struct.pack(">3H", 0x8000, 0x8000, 0x8000) * 16

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", 32, 32, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * 32)) + chunk(b"IEND", b"")
    got = pixels(kept(data).data)
    assert got[16, 4].max() < 5
    assert abs(got[16, 28] - 128).max() < 5


def test_floats_use_their_own_range():
    ramp = np.tile(np.linspace(-3.0, 7.0, 64, dtype=np.float32), (32, 1))
    ramp[0, 0] = np.nan
    got = pixels(kept(save(Image.fromarray(ramp), "TIFF")).data)[8, :, 0]
    assert (got[0], got[-1]) == (pytest.approx(0, abs=4), pytest.approx(255, abs=4))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_alpha_lies_on_white(mode, kind):
    image = scene(mode)
    image.putalpha(Image.linear_gradient("L").resize(image.size))  # transparent at the top, opaque below
    got = pixels(kept(save(image, kind)).data)
    assert got[0, 0].min() > 245
    assert np.abs(got[-1] - np.asarray(image.convert("RGB"))[-1]).max() < 30


def test_palette_transparency_lies_on_white():
    image = scene().quantize(16)
    corner = image.getpixel((0, 0))
    for kind in ("PNG", "GIF"):
        picture = kept(save(image, kind, transparency=corner))
        assert pixels(picture.data)[0, 0].min() > 230, kind
        assert "transparency" in picture.changes


def test_colour_key_transparency_lies_on_white():
    image = Image.new("RGB", (32, 32), (10, 20, 30))
    image.paste((200, 0, 0), (16, 0, 32, 32))
    got = pixels(kept(save(image, "PNG", transparency=(10, 20, 30))).data)
    assert got[16, 2].min() > 240
    assert got[16, 28, 1] < 30


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation):
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that makes a stored picture of an upright one
    stored = scene() if orientation == 1 else scene().transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[274] = orientation
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        picture = kept(save(stored, kind, exif=exif))
        assert (picture.width, picture.height) == (48, 32)
        assert np.abs(pixels(picture.data) - np.asarray(scene())).mean() < 8, kind


def test_damaged_exif_is_as_none():
    data = save(scene(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff broken")
    assert kept(data).data == data


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(kind):
    others = [Image.new("RGB", (48, 32), colour) for colour in ("blue", "green")]
    picture = kept(save(scene(), kind, save_all=True, append_images=others))
    assert "first_frame" in picture.changes
    assert np.abs(pixels(picture.data) - np.asarray(scene())).mean() < 12


def test_damaged_second_frame_leaves_the_first():
    frames = [Image.effect_noise((48, 32), 60 + i) for i in range(4)]
    data = save(frames[0], "GIF", save_all=True, append_images=frames[1:])
    picture = kept(data[: len(data) // 2])
    assert np.abs(pixels(picture.data)[..., 0] - np.asarray(frames[0])).mean() < 10


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated(kind, share):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    data = save(noise, kind)
    assert normalise(data[: int(len(data) * share)], PARAMS) is Reason.TRUNCATED_IMAGE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 1000,
        b"<!DOCTYPE html><html><body>404</body></html>",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='64' height='64'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n",
        b"%PDF-1.4",
    ],
)
def test_no_picture(data):
    assert normalise(data, PARAMS) is Reason.UNDECODABLE


def test_garbage_inside_a_whole_frame_is_undecodable():
    data = save(scene(), "PNG")
    where = data.index(b"IDAT") + 8
    assert normalise(data[:where] + b"\xff" * 20 + data[where + 20 :], PARAMS) is Reason.UNDECODABLE


@pytest.mark.parametrize("side", [60_000, 2_000_000])
def test_declared_size_is_refused_before_decoding(side):
    """A PNG of a few bytes that declares gigapixels (the larger one is past Pillow's own limit too)."""
    data = bytearray(save(Image.new("RGB", (16, 16)), "PNG"))
    data[16:24] = struct.pack(">II", side, side // 10)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert normalise(bytes(data), PictureParams(max_aspect=100, max_pixels=150_000_000)) is Reason.IMAGE_TOO_LARGE


def test_limits():
    assert normalise(save(scene(size=(64, 7)), "PNG"), PARAMS) is Reason.IMAGE_TOO_SMALL
    assert normalise(save(scene(size=(81, 16)), "PNG"), PARAMS) is Reason.IMAGE_ASPECT
    assert normalise(save(scene(size=(16, 81)), "PNG"), PARAMS) is Reason.IMAGE_ASPECT
    assert isinstance(normalise(save(scene(size=(80, 16)), "PNG"), PARAMS), Picture)
    assert normalise(save(scene(size=(80, 16)), "PNG"), PictureParams(max_pixels=1279)) is Reason.IMAGE_TOO_LARGE


@pytest.mark.parametrize("resample", ["lanczos", "bicubic", "bilinear", "box"])
def test_scaling_down(resample):
    params = PictureParams(min_side=8, max_side=24, resample=resample)
    picture = kept(save(scene(), "JPEG"), params)
    assert (picture.width, picture.height, picture.changes) == (24, 16, ("scaled",))
    assert np.abs(pixels(picture.data) - np.asarray(scene().resize((24, 16)))).mean() < 6
    small = save(scene(size=(24, 24)), "JPEG")
    assert kept(small, params).data == small


def test_a_jpeg_is_scaled_down_from_a_smaller_decode():
    large = scene(size=(1200, 801))
    params = PictureParams(min_side=8, max_side=100)
    picture = kept(save(large, "JPEG"), params)
    assert (picture.width, picture.height) == (100, 67)
    assert np.abs(pixels(picture.data) - np.asarray(large.resize((100, 67), Image.Resampling.LANCZOS))).mean() < 3
    exif = Image.Exif()
    exif[274] = 6
    lying = kept(save(large, "JPEG", exif=exif), params)
    assert (lying.width, lying.height, lying.changes) == (67, 100, ("orientation", "scaled"))
    grey = kept(save(large.convert("L"), "JPEG"), params)
    assert (grey.width, grey.height) == (100, 67)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no bytes"),
        (b" \n", "no picture"),
        (b"\xef\xbb\xbf\n <!DOCTYPE HTML><html>", "a web page"),
        (b"<?xml version='1.0'?><svg/>", "an SVG drawing"),
        (b"%PDF-1.4", "of no format that is read"),
        (b"\x89PNG\r\n\x1a\n broken", None),
        (save(scene(size=(64, 7)), "PNG"), "64 x 7 pixels"),
    ],
)
def test_a_rejected_picture_says_why(data, said):
    assert why(data, normalise(data, PARAMS)) == said


def test_quality_and_format_by_parameter():
    noise = save(Image.effect_noise((64, 64), 80).convert("RGB"), "PNG")
    sizes = [len(kept(noise, PictureParams(quality=quality)).data) for quality in (30, 95)]
    assert sizes[0] < sizes[1] / 2
    exact = kept(noise, PictureParams(encode="png"))
    assert (pixels(exact.data) == pixels(noise)).all()


_SAMPLES = [save(scene(), "JPEG"), save(scene(), "PNG"), save(scene("P"), "GIF"), save(scene(), "WEBP")]
_SAMPLES += [save(scene(), "TIFF"), save(scene(), "BMP")]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(_SAMPLES), st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=8)), max_size=6)
)
def test_altered_bytes_never_crash(data, edits):
    data = bytearray(data)
    for where, piece in edits:
        data[where % len(data) : where % len(data) + len(piece)] = piece
    result = normalise(bytes(data), PARAMS)
    if isinstance(result, Picture):
        assert min(result.width, result.height) >= PARAMS.min_side
        open_picture(result.data).load()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([b"", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF", b"II*\0", b"BM"]), st.binary()
)
def test_random_bytes_never_crash(head, tail):
    assert isinstance(normalise(head + tail, PARAMS), Picture | Reason)
