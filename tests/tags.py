# SPDX-License-Identifier: MIT
"""Reads a page of HTML."""

from __future__ import annotations

from html.parser import HTMLParser


class Tags(HTMLParser):
    """Counts tags, and fails where they do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
