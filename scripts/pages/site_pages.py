"""Add the repository's own pages to the documentation site; a hook of `mkdocs.yml`.

The README, the changelog and the other pages outside `docs/` become pages of the site; files that
pages link to become files of the site. Relative links, which are written to be followed in the
repository, are rewritten to these places. A link to a file that does not exist is left as it is:
the strict build then fails.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"

# A page's file in the repository, and its place in the site.
PAGES = {
    # The home page is docs/index.md, into which the README's first screen is copied.
    "README.md": "overview.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    # Not beside docs/security.md, whose name differs in case only.
    "SECURITY.md": "reporting.md",
    "recipes/README.md": "recipes/README.md",
}
FILES = {place: file for file, place in PAGES.items()}

HOME = "docs/index.md"
FIRST_SCREEN = "<!-- first screen of README.md -->"

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside `docs/`, and every file outside it that a page links to."""
    for file, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / file)))
    for page in list(files.documentation_pages()):
        for target in linked_files(page.content_string, repository_file(page.src_uri)):
            if (ROOT / target).is_file() and files.get_file_from_path(site_place(target)) is None:
                path = str(ROOT / target)
                files.append(File.generated(config, site_place(target), abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's relative links to the places that their targets have in the site."""
    file = repository_file(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)
    text = with_links_of_the_site(markdown, file, folder)
    if file == HOME:
        screen = with_links_of_the_site(first_screen(), "README.md", folder)
        text = text.replace(FIRST_SCREEN, screen)
    return text


def first_screen() -> str:
    """Return the README from below its title to its second heading."""
    readme = (ROOT / "README.md").read_text()
    _, below_title = readme.split("\n", maxsplit=1)
    return below_title.partition("\n## ")[0].strip()


def with_links_of_the_site(markdown: str, file: str, folder: str) -> str:
    """Return a file's text with its relative links made to fit a page in `folder` of the site."""

    def rewritten(link: re.Match[str]) -> str:
        target = linked_file(link[1], file)
        if target is None or not (ROOT / target).is_file():
            return link[0]
        return posixpath.relpath(site_place(target), folder or ".") + (link[2] or "")

    return "".join(
        part if is_code else LINK.sub(rewritten, part) for part, is_code in parts(markdown)
    )


def parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the text in order, in pieces, each with whether it is a fenced code block."""
    start = 0
    for fence in FENCE.finditer(markdown):
        yield markdown[start : fence.start()], False
        yield fence[0], True
        start = fence.end()
    yield markdown[start:], False


def linked_files(markdown: str, file: str) -> Iterator[str]:
    """Yield the repository paths that a page's relative links point to."""
    for part, is_code in parts(markdown):
        if not is_code:
            targets = (linked_file(link[1], file) for link in LINK.finditer(part))
            yield from (target for target in targets if target is not None)


def linked_file(link: str, file: str) -> str | None:
    """Return the repository path that a link in a file points to; None for another site's."""
    if re.match(r"[a-z]+:|/", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), link))
    return posixpath.join(target, "README.md") if (ROOT / target).is_dir() else target


def site_place(file: str) -> str:
    """Return the place in the site of a file of the repository."""
    return PAGES.get(file, file.removeprefix(DOCS))


def repository_file(place: str) -> str:
    """Return the file of the repository that has this place in the site."""
    return FILES.get(place, DOCS + place)
