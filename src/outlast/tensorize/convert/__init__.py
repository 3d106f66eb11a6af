"""From dense weights to the factors of every form.

Pure functions on tensors: each takes a weight (out, in) and a rank or an error, computes in
float64, and returns a `svd.Factored`, whose cores are those of the layer of that form.
"""
