"""One attention whose queries, keys and values are linears of one activation `[B, S, 64]`.

Constants: wq `[64, 64]`, wk and wv `[64, 32]`, with biases bq `[64]`, bk and bv `[32]`; int64 zero
and one `[1]`.
"""

TEXT = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g ({dtype}[B, S, 64] x) => ({dtype}[B, S, 64] y{more}) {{
    {linears}
    shape = Shape(x)
    b = Slice(shape, zero, one)
    s = Slice(shape, one, two)
    last = Sub(s, one)
    whole = Cast<to = 6>(last)
    lengths = Expand(whole, b)
    length = Cast<to = 6>(s)
    total = Squeeze(length)
    y = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>
        (q, k, v, , , lengths, total)
}}"""
PLAIN = "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
BIASED = """a = MatMul(x, wq) q = Add(a, bq) c = MatMul(x, wk) k = Add(c, bk)
    d = MatMul(x, wv) v = Add(d, bv)"""
