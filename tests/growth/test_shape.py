"""A table of segments and a config say the same, whatever the table."""

from growing import config
from hypothesis import given
from hypothesis import strategies as st

from tokenformer.config import PROJECTIONS
from tokenformer.growth.shape import table, with_table

SEGMENTS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([1.0, 2.5, 3.0]), st.sampled_from(["", "image"])),
    min_size=1,
    max_size=3,
)


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.fixed_dictionaries({w: st.lists(SEGMENTS, min_size=n, max_size=n) for w in PROJECTIONS})
    )
)
def test_a_table_survives_its_config(segments):
    assert table(with_table(config(), segments)) == segments
