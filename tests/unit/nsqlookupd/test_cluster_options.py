"""What the options of a nsqlookupd in a cluster have to be together."""

from __future__ import annotations

import pytest

from flintmq.errors import OptionError
from flintmq.nsqlookupd.options import NsqlookupdOptions


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cluster_store": ("own",)}, "--store-path"),
        ({"cluster_store": ("own", "a:1"), "store_path": "x"}, "address 1 of 2 cannot be read"),
        ({"cluster_store": ("http://me:secret@a:x",)}, "http\\(s\\)://"),
        ({"cluster_store": ("a:1",), "http_address": "/tmp/socket"}, "others have to reach it"),
        ({"cluster_store": ("a:1",), "tcp_address": "/tmp/socket"}, "others have to reach it"),
        ({"cluster": "a/b"}, "1 to 64"),
        ({"cluster": ""}, "1 to 64"),
        ({"cluster": "other"}, "it needs --cluster-store"),
        ({"allow_same_host": True}, "it needs --cluster-store"),
        ({"default_partitions": 2}, "it needs --cluster-store"),
        ({"default_replicator": 2}, "it needs --cluster-store"),
    ],
)
def test_what_cannot_be_is_refused(given, reason):
    with pytest.raises(OptionError, match=reason) as refused:
        NsqlookupdOptions(**given).check_together()
    assert "secret" not in str(refused.value)


def test_what_can_be():
    NsqlookupdOptions(cluster_store=("own",), store_path="x").check_together()
    NsqlookupdOptions(cluster_store=("a:1", "https://me:secret@b:2"), cluster="x-1.y_2").check_together()
