"""The drawings of docs/concepts, each a small program that writes an SVG.

They are committed, so that a page in a checkout shows them; ``tests/site/test_drawings.py`` makes them again and
compares. No program draws text as paths: a reader can search and select it, and a changed word is a changed line.

    python -m docsite.drawings            # writes docs/concepts/*.svg
"""
