"""docs/guarantees.md promises nothing without a test that shows it."""

from __future__ import annotations

import guarantees
from guarantees import PAGE, Proof, missing, proofs, sentences


def test_every_sentence_names_a_test_and_every_test_exists():
    page = PAGE.read_text()
    named = proofs(page)
    promises = sentences(page)
    assert len(promises) > 20
    bare = [f"line {promise.line}: {promise.text}" for promise in promises if not promise.notes]
    assert not bare, "sentences without a test:\n" + "\n".join(bare)
    used = {note for promise in promises for note in promise.notes}
    assert used == named.keys()
    assert all(named.values()), [note for note, tests in named.items() if not tests]
    gone = [str(proof) for tests in named.values() for proof in tests if not proof.exists()]
    assert not gone, f"tests that are not there: {gone}"


def test_a_sentence_is_found_wherever_it_stands():
    page = """# A page

An introduction promises nothing. Not even here.

## A promise

It is kept.[^a] This one is
not. `code()` is neither, e.g. Here.

- A point.[^a][^b]
- Another, *loud*.

| when | what |
| --- | --- |
| it rains | it is wet[^b] |

[^a]: `tests/x.py::test_x`
[^b]: `tests/y.py::test_y`,
    `crates/penstock-z/src/z.rs::z`
"""
    found = [(sentence.text, sentence.notes) for sentence in sentences(page)]
    assert found == [
        ("It is kept.", ("a",)),
        ("This one is not.", ()),
        ("`code()` is neither, e.g. Here.", ()),
        ("A point.", ("a", "b")),
        ("Another, *loud*.", ()),
        ("it rains | it is wet", ("b",)),
    ]
    assert proofs(page)["b"] == [Proof("tests/y.py", "test_y"), Proof("crates/penstock-z/src/z.rs", "z")]


def test_a_test_that_did_not_run_is_named(tmp_path):
    page = """
[^a]: `tests/x.py::test_x`
[^b]: `crates/penstock-z/src/z.rs::good`, `crates/penstock-z/tests/y/q.rs::bad`
[^c]: `crates/penstock-sim/src/model.rs::check`
[^d]: `tests/v.py::test_v`
"""
    (tmp_path / "python.txt").write_text("skipped tests/v.py::test_v\ntests/x.py::test_x[3]\n")
    (tmp_path / "rust.txt").write_text(
        "     Running unittests src/lib.rs (target/debug/deps/penstock_z-0a1b)\n"
        "test z::tests::good ... ok\n"
        "     Running tests/y/main.rs (target/debug/deps/y-0a1b)\n"
        "test q::bad ... FAILED\n"
        "test q::other ... ok\n"
    )
    (tmp_path / "simulate.txt").write_text("2 seeds, 1000 steps in 0.1 s\n")
    ran = guarantees.passed(tmp_path)
    bad, skipped = (
        "[^b] names crates/penstock-z/tests/y/q.rs::bad, which did not run",
        "[^d] names tests/v.py::test_v, which did not run",
    )
    assert missing(page, ran) == [bad, skipped]
    assert missing(page, ran | guarantees.skipped(tmp_path)) == [bad]
