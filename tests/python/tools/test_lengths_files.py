"""Lengths from files of many kinds, and what columns mean."""

import json

import pytest
from knapformer.tools.lengths_files import lengths_of, read_samples
from knapformer.tools.model_presets import PRESETS

import knapformer as kf

CLIP = 52 * 30 * 21  # tokens of 832 x 480 pixels and 81 frames in Wan: patches of 16 x 16 pixels and 4 frames


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "path,width,height,fps,duration\na.mp4,832,480,16,5.0625\n"),
        ("a.csv", "img_width,img_height,n_frames\n832,480,81\n"),
        ("a.csv", "resolution,num_frames,fps,duration\n832x480,81,16,9\n"),
        ("a.csv", 'resolution,frames\n"(832, 480)",81\n'),
        ("a.tsv", "W\tH\tFrames\n832\t480\t81.0\n"),
        ("a.jsonl", '{"resolution": [832, 480], "nb_frames": 81, "size": 123456}\n'),
        ("a.csv", "img_size,num_frames,text_tokens\n832x480,81,7\n"),
        # sd-scripts writes train_resolution, SimpleTuner target_size; both by the name of a file.
        ("meta_lat.json", '{"a": {"caption": "x", "train_resolution": [832, 480], "num_frames": 81}}'),
        ("meta.json", '{"a": {"original_size": [1920, 1080], "target_size": [832, 480], "crop_coordinates": [0, 0], '
         '"num_frames": 83, "bucket_frames": 81, "fps": 24.0, "video_duration": 3.5}}'),
    ],
)  # fmt: skip
def test_columns_are_recognised_by_their_names(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    samples = read_samples(str(path), PRESETS["wan-14b"])
    assert (list(samples.lengths), samples.bad_rows) == ([CLIP], 0)


def test_columns_of_texts_and_lists_are_read_from_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"caption": ["x"], "resolution": ["832x480"], "frames": [81]}), path)
    assert list(read_samples(path, PRESETS["wan-14b"]).lengths) == [CLIP]
    parquet.write_table(pyarrow.table({"caption": ["x"], "target_size": [[832, 480]], "n": [81]}), path)
    given = {"size": "target_size", "frames": "n"}
    assert list(read_samples(path, PRESETS["wan-14b"], given).lengths) == [CLIP]


@pytest.mark.parametrize(
    ("heading", "got", "tokens"),
    [
        ("width,height,length", "expected the tokens of a sample, or its size", 52 * 30),
        ("width,image_width,height", "'width', 'image_width', expected one for the width", 52 * 5),
        ("width,height,resolution", "'width', 'height', 'resolution', expected one size", 52 * 30),
        ("width,height,duration", "expected both fps and duration, or", 52 * 30),
        ("width,height,fps", "expected both fps and duration, or frames", 52 * 30),
    ],
)
def test_ambiguous_columns_are_an_error_that_says_what_to_write(tmp_path, heading, got, tokens):
    path = tmp_path / "a.csv"
    path.write_text(f"{heading}\n832,480,81\n")
    with pytest.raises(kf.ArgumentError, match=r"--columns .*width=width, .*height=height") as raised:
        read_samples(str(path), PRESETS["wan-14b"])
    assert got in str(raised.value)
    given = {"width": "width", "height": "height"}
    assert list(read_samples(str(path), PRESETS["wan-14b"], given).lengths) == [tokens]
    if "length" in heading:
        assert list(read_samples(str(path), PRESETS["wan-14b"], {"length": "length"}).lengths) == [81]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "832,480,81\n", "the first line is '832,480,81', expected the names of the columns, such as 'width"),
        ("a.csv", "832x480,81\n", "the first line is '832x480,81'"),
        ("a.csv", "a;b\n1;2\n", "values are separated by ','"),
        ("a.csv", "width,caption\n1,2\n", "expected a column of lengths in tokens, or of widths and heights"),
        ("a.csv", "width,height,frames\n832,480,81\n", "--model: got flux, the default, a model of pictures, for a "),
        ("a.jsonl", '{"size": 1}\n{"width": 832, "height": 480, "frames": 2}\n', "expected a model of videos: hunyuan"),
        ("a.csv", 'resolution\n"832,480"\n720p\n', "3 of 3 rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text + ("1024x\n" if "3 of 3" in message else ""))
    with pytest.raises(kf.ArgumentError) as raised:
        read_samples(str(path), PRESETS["flux"])
    assert message in str(raised.value)


def test_rows_that_do_not_say_one_thing_are_left_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('size_px,frames\n"[480]",81\n832x480x3,81\n1,024,9\n832x480,0\n"[832, 480]",5\n')
    samples = read_samples(str(path), PRESETS["wan-14b"], {"size": "size_px", "frames": "frames"})
    assert (list(samples.lengths), samples.num_rows, samples.bad_rows) == ([52 * 30 * 2], 5, 4)
    with pytest.raises(kf.ArgumentError, match=r"1 of 2 rows \(50.0%\) cannot be read, the first of them row 2"):
        path.write_text("num_tokens\n7\nx\n")
        lengths_of(str(path))


@pytest.mark.parametrize(
    ("heading", "model", "said"),
    [
        ("width,height", "flux", "width from 'width', height from 'height', captions left out, as no column"),
        ("width,height", "wan-14b", "every sample a picture of one frame, as no column holds frames"),
        ("num_tokens,seq", "flux", "tokens from 'num_tokens'"),
    ],
)
def test_what_is_read_and_assumed_is_said(tmp_path, heading, model, said):
    path = tmp_path / "a.csv"
    path.write_text(f"{heading}\n832,480\n")
    assert said in read_samples(str(path), PRESETS[model]).read_as


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [  # counted by hand: latents over patches, and captions where they are in the sequence
        ("flux", (1024, 1024, 1, 512), 64 * 64 + 512),
        ("flux", (1000, 520, 1, 0), 62 * 32),
        ("wan-14b", (1280, 720, 81, 512), 80 * 45 * 21),
        ("hunyuan-video", (1280, 720, 129, 256), 80 * 45 * 33 + 256),
        ("ltx-video", (768, 512, 121, 128), 24 * 16 * 16),
    ],
)
def test_sizes_become_tokens(model, size, tokens):
    assert PRESETS[model].num_tokens(*size) == tokens


def write_all_formats(folder):
    import pyarrow
    from pyarrow import parquet

    lengths = [5, 70, 900, 12]
    texts = {
        "plain.txt": "5\n70\n\n900\n12\n",
        "list.json": "[5, 70, 900, 12]",
        "objects.json": json.dumps([{"id": "a", "num_tokens": n} for n in lengths], indent=1),
        "lines.jsonl": "".join(json.dumps({"num_tokens": n, "caption": "x"}) + "\n" for n in lengths),
        "table.csv": "caption,num_tokens\n" + "".join(f'"a, ""b""",{n}\n' for n in lengths),
        "table.tsv": "num_tokens\tcaption\n" + "".join(f"{n}\ta, b\n" for n in lengths),
        "quoted.csv": '"num_tokens"\n5\n70\n900\n12\n',
        "bare.csv": "5\n70\n900\n12\n",
        "steps.json": "[[[5], [70]], [[900, 12], []]]",
        "steps.jsonl": "[[5], [70]]\n[[900, 12], []]\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    table = pyarrow.table({"caption": ["x"] * 4, "num_tokens": pyarrow.array(lengths, pyarrow.int32())})
    parquet.write_table(table, folder / "table.parquet")
    return lengths


def test_every_format_is_read(tmp_path):
    lengths = write_all_formats(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 11
    for path in files:
        samples = read_samples(str(path), None)
        assert list(samples.lengths) == lengths, path.name
        assert samples.batches == ([[[5], [70]], [[900, 12], []]] if path.stem == "steps" else []), path.name


@pytest.mark.parametrize(("name", "heading"), [("a.csv", "num_tokens\r\n"), ("a.txt", ""), ("a.csv", "")])
def test_a_file_of_a_spreadsheet_loses_no_row(tmp_path, name, heading):
    """It begins with a byte order mark."""
    path = tmp_path / name
    path.write_bytes(f"\ufeff{heading}5\r\n70\r\n".encode())
    samples = read_samples(str(path), None)
    assert (list(samples.lengths), samples.bad_rows) == ([5, 70], 0)


def test_bad_rows_are_counted_and_the_first_is_named(tmp_path):
    """Integers may be written as floats, as pandas writes a column with a missing cell."""
    table = tmp_path / "a.csv"
    table.write_text("num_tokens\n256.0\n\n1e3\n256.5\nnan\ninf\n-4.0\n 7 \n2_0\n")
    samples = read_samples(str(table), None)
    assert (list(samples.lengths), samples.bad_rows) == ([256, 1000, 7, 20], 4)
    assert samples.first_bad == "row 3: length: got '256.5', expected an integer, at least 1"
    path = tmp_path / "sizes.csv"
    path.write_text("w,h,n_frames\n512,512,1\n512,x,1\n0,512,1\n512\n1024,512,1\n8,8,1\n")
    samples = read_samples(str(path), PRESETS["flux"])
    assert list(samples.lengths) == [1024, 2048]
    assert samples.bad_rows == 4
    assert samples.first_bad == "row 2: height: got 'x', expected an integer, at least 1"
    lines = tmp_path / "lines.jsonl"
    lines.write_text('7\n{"a": 1}\n-3\n2.5\ntrue\nnonsense\n9\n')
    samples = read_samples(str(lines), None)
    assert (list(samples.lengths), samples.bad_rows) == ([7, 9], 5)
    lines.write_text("7\n" + "[" * 100_000 + "\n9\n")  # nested deeper than the parser goes
    samples = read_samples(str(lines), None)
    assert (list(samples.lengths), samples.bad_rows) == ([7, 9], 1)


def test_a_quote_left_open_is_named(tmp_path):
    """It makes one field of the lines behind it."""
    path = tmp_path / "captions.csv"
    path.write_text("caption,num_tokens\na,5\n" + '"b,70\n' + "c,900\n" * 30_000)
    with pytest.raises(kf.ArgumentError, match=r"captions.csv: line [0-9]+: field larger than .* every quote"):
        read_samples(str(path), None)
