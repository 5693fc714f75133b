"""The demo: workers that are killed write real flights atomically to a database and to Kafka; then both are compared.

`dualwrite.demo.run.run_demo` runs it. Nothing is imported here, so that a killed worker restarts fast.
"""
