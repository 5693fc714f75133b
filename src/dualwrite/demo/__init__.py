"""The demo: real flights written to a database and to Kafka as one, by workers that are killed; then both are compared.

`dualwrite.demo.run.run_demo` is the whole of it. Nothing is imported here: a killed worker starts again as fast as it can.
"""
