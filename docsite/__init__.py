"""What is made while the documentation site is built, and what its pages show.

``hooks`` is loaded by mkdocs (see ``mkdocs.yml``): files of the repository that pages link to become pages of the
site, so that a link works in a checkout and in the site alike. Nothing here is installed with raftkv, and nothing
asks the network.

    make docs                       # build/site/index.html, strict: a broken link fails it
"""
