"""The flags of ``raftkv serve``: etcd's names, defaults and messages, from words, ``ETCD_*`` or a YAML file.

``flags`` is the table, ``options`` makes a configuration out of what was given. Laws: a flag beats a variable, a file
beats both and is alone; a setting that cannot be used is one line that names it. Example:
``read_options(["--name=a"], {}).config.name``. Leaves out: what a setting does (``raftkv.config``, ``raftkv.server``).
"""
