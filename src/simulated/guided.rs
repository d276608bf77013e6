//! Answers that must have a form: one given text, an instance of a JSON schema, a tool call. Pure.
//! vLLM guides its model there; here the text is simply written.

use serde_json::{Map, Value};

const DEPTH_MAX: u32 = 32;

/// What must be said.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Guided {
    pub(super) text: String,
    /// Set when the text is the arguments of a call of this tool.
    pub(super) tool: Option<String>,
}

/// The form a request asks for, if it asks for one.
pub(super) fn guided(body: &Value) -> Option<Guided> {
    let plain = |text: String| Some(Guided { text, tool: None });
    if let Some(text) = body["structured_outputs"]["choice"][0].as_str() {
        return plain(text.to_owned());
    }
    if let Some(tool) = wanted_tool(body) {
        let name = tool["name"].as_str().map(str::to_owned);
        return Some(Guided { text: instance(&tool["parameters"], 0).to_string(), tool: name });
    }
    let schema = [
        &body["structured_outputs"]["json"],
        &body["response_format"]["json_schema"]["schema"],
        &body["text"]["format"]["schema"],
    ];
    if let Some(schema) = schema.into_iter().find(|schema| schema.is_object()) {
        return plain(instance(schema, 0).to_string());
    }
    if body["response_format"]["type"] == "json_object" {
        return plain("{}".to_owned());
    }
    None
}

/// The tool that `tool_choice` names, or the first if any must be called.
fn wanted_tool(body: &Value) -> Option<&Value> {
    let mut tools = body["tools"].as_array()?.iter().map(|tool| &tool["function"]);
    match &body["tool_choice"] {
        Value::String(choice) if choice == "required" => tools.next(),
        choice => tools
            .find(|tool| tool["name"].is_string() && tool["name"] == choice["function"]["name"]),
    }
}

/// The plainest value that a schema allows, as far as types and enums go.
fn instance(schema: &Value, depth: u32) -> Value {
    if depth >= DEPTH_MAX {
        return Value::Null;
    }
    if let Some(value) = schema.get("const").or_else(|| schema["enum"].get(0)) {
        return value.clone();
    }
    for one_of in ["anyOf", "oneOf", "allOf"] {
        if let Some(first) = schema[one_of].get(0) {
            return instance(first, depth + 1);
        }
    }
    let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str());
    match kind {
        Some("string") => Value::from("text"),
        Some("integer") => schema.get("minimum").cloned().unwrap_or_else(|| Value::from(1)),
        Some("number") => schema.get("minimum").cloned().unwrap_or_else(|| Value::from(1.5)),
        Some("boolean") => Value::Bool(true),
        Some("null") => Value::Null,
        Some("array") => Value::Array(vec![instance(&schema["items"], depth + 1)]),
        _ => {
            let properties = schema["properties"].as_object();
            let each = properties.into_iter().flatten();
            let fields = each.map(|(name, of)| (name.clone(), instance(of, depth + 1)));
            Value::Object(fields.collect::<Map<_, _>>())
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_schema_gets_an_instance_and_a_tool_its_arguments() {
        let schema = json!({"type": "object", "properties": {
            "city": {"enum": ["Paris", "Oslo"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        }});
        let wanted = r#"{"city":"Paris","days":[1]}"#;
        let format = json!({"response_format": {"type": "json_schema",
            "json_schema": {"schema": schema}}});
        assert_eq!(guided(&format).unwrap().text, wanted);
        let tools = json!([{"function": {"name": "other"}},
            {"function": {"name": "weather", "parameters": schema}}]);
        let named = json!({"tools": tools, "tool_choice": {"function": {"name": "weather"}}});
        let call = Guided { text: wanted.to_owned(), tool: Some("weather".to_owned()) };
        assert_eq!(guided(&named), Some(call));
        let required = json!({"tools": tools, "tool_choice": "required"});
        assert_eq!(guided(&required).unwrap().tool.as_deref(), Some("other"));
        assert_eq!(guided(&json!({"tools": tools, "tool_choice": "auto"})), None);
        assert_eq!(guided(&json!({"tools": tools})), None);
    }
}
