"""NSQ's data directories: taken over when nsqd starts on one, and ``nsqd.dat`` kept up to date for going back.

A leaf: nsqd calls :func:`flintmq.migrate.takeover.take_over` before it opens its own data, and tells
:class:`flintmq.migrate.metadata_file.MetadataFile` of changes. Modules: ``takeover`` (the steps) > ``topic_import``
(one topic's queues into its log) > ``diskqueue`` (NSQ's queue files); ``metadata_file`` (``nsqd.dat``).

Source: NSQ's data files.
"""
