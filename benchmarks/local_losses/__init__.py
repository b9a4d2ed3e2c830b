"""Local losses beside backpropagation: accuracy, bytes of a step, and pipelines without a gradient on the wire."""
