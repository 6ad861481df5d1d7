{% macro milliseconds(interval) %}epoch_ms({{ interval }}){% endmacro %}
