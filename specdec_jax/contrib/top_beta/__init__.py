"""The relaxed rule of SpecDec (Xia et al.), which is not lossless."""
