"""Experiments on magicjax: data, training of the embedded models, launcher, reports."""
