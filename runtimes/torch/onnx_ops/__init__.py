"""ONNX operators in torch, one file per family; `qgraph.runtimes.torch.table` lists them."""

if __name__ != "qgraph.runtimes.torch.onnx_ops":
    raise ImportError("import this package as qgraph.runtimes.torch.onnx_ops, not as onnx_ops")
