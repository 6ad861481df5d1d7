"""The codecs that durable brings, one module for each. durable.codec says which of them is used."""
