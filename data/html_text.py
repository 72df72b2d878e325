"""HTML of a question-and-answer site -> the plain text a language model should read.

By hand, because BeautifulSoup's `get_text` drops what separates blocks and marks code, and converters to Markdown add
escapes that the text does not have.
"""

import re

BLOCKS = frozenset(
    (
        "p div section article h1 h2 h3 h4 h5 h6 dl dt dd table tr hr body html center details summary figure "
        "figcaption address main form"
    ).split()
)
MAX_UNFINISHED = 100  # tags, comments or marked sections that never end; a text that was written by people has few
DROPPED = {"script", "style", "template", "noscript", "head", "title", "iframe", "object", "svg", "math"}


def html_to_text(html: str) -> str:
    """Keeps words, code (as <code>...</code>, verbatim), link text, lists and quotes; drops other markup and comments.

    Blocks are separated by an empty line, list items by a line each, quotes start with '> '.
    Raises ValueError when the nesting is too deep to be a document.
    """
    if "<" not in html and "&" not in html:
        return _joined([_squeezed(html)])
    from bs4 import BeautifulSoup
    from bs4.exceptions import ParserRejectedMarkup

    html = _without_unfinished(html)
    try:
        # html.parser rather than lxml: the same tree on every machine, whatever else is installed.
        try:
            tree = BeautifulSoup(html, "html.parser")
        except ParserRejectedMarkup:  # a marked section without a name, which a browser takes for a comment
            tree = BeautifulSoup(html.replace("<![", "&lt;!["), "html.parser")
        return _joined(_blocks(tree))
    except RecursionError as error:
        raise ValueError("HTML nested too deeply") from error


def _without_unfinished(html: str) -> str:
    """The same HTML with what opens and never closes written as text, which is what html.parser makes of it.

    For each of these it reads on to the end of the text, so that a text full of them would take minutes.
    """
    for opening, closing in (("<", ">"), ("<!--", "-->"), ("<![", "]>")):
        last = html.rfind(closing) + 1
        if html.count(opening, last) > MAX_UNFINISHED:
            html = html[:last] + html[last:].replace(opening, "&lt;" + opening[1:])
    return html


def _squeezed(text: str) -> str:
    return re.sub(r"[ \t\r\n\f\v]+", " ", text)


def _joined(blocks) -> str:
    return "\n\n".join(block for block in blocks if block.strip())


def _blocks(parent) -> list[str]:
    """The blocks of text inside `parent`, in order."""
    from bs4 import NavigableString

    blocks: list[str] = []
    line: list[str] = []

    def end_line():
        text = "".join(line)
        line.clear()
        # Squeezing ran per piece; what is left are the doubled blanks where two pieces met. Code keeps its blanks.
        pieces = re.split(r"(<code>.*?</code>)", text, flags=re.DOTALL)
        pieces[::2] = [re.sub(r" *\n *", "\n", re.sub(r" {2,}", " ", piece)) for piece in pieces[::2]]
        blocks.append("".join(pieces).strip())

    def add(node):
        if isinstance(node, NavigableString):
            if type(node) is NavigableString:  # its subclasses are comments, doctypes, CDATA, scripts, ...
                line.append(_squeezed(str(node)))
            return
        name = node.name
        if name in DROPPED:
            return
        if name == "br":
            line.append("\n")
        elif name == "pre":
            end_line()
            blocks.append("<code>" + node.get_text().strip("\n") + "</code>")
        elif name == "code":
            line.append("<code>" + node.get_text() + "</code>")
        elif name in ("ul", "ol"):
            end_line()
            blocks.append(_list(node))
        elif name == "blockquote":
            end_line()
            quoted = _joined(_blocks(node))
            blocks.append("\n".join("> " + each if each else ">" for each in quoted.split("\n")))
        elif name in BLOCKS:
            end_line()
            blocks.extend(_blocks(node))
        elif name in ("td", "th"):
            line.append(" ")
            for child in node.children:
                add(child)
            line.append(" ")
        else:  # inline markup: its words stay
            for child in node.children:
                add(child)

    for child in parent.children:
        add(child)
    end_line()
    return [block for block in blocks if block.strip()]


def _list(node) -> str:
    from bs4 import Tag

    items, lines = 0, []
    for child in node.children:
        if isinstance(child, Tag) and child.name == "li":
            items += 1
            mark = f"{items}. " if node.name == "ol" else "- "
            first, *rest = "\n".join(_blocks(child)).split("\n")
            lines += [mark + first] + [" " * len(mark) + each if each else "" for each in rest]
        elif isinstance(child, Tag):  # invalid but common: a list straight inside a list
            lines += ["  " + each for each in "\n".join(_blocks_of(child)).split("\n")]
        elif str(child).strip() and type(child).__name__ == "NavigableString":
            lines.append(_squeezed(str(child)).strip())
    return "\n".join(lines)


def _blocks_of(tag) -> list[str]:
    """The blocks of one tag, the tag's own meaning included."""
    return [_list(tag)] if tag.name in ("ul", "ol") else _blocks(tag)
