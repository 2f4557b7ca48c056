"""One document, with its title as text and a policy that forbids scripts."""

from gspo.reporting.page import document


def test_the_document_holds_its_parts_and_nothing_to_load() -> None:
    page = document("<run>", ["<h1>a</h1>", "<p>b</p>"], ".x { color: red; }")
    assert page.startswith("<!doctype html>")
    assert "<title>&lt;run&gt;</title>" in page
    assert "<body><h1>a</h1><p>b</p></body>" in page
    assert ".x { color: red; }</style>" in page
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    assert page.index(policy) < page.index("<style>")
